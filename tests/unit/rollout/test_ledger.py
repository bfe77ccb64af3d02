"""The ledger's columns stay equal, append-only and within budget for any sequence of appends."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retool_mcore.rollout.ledger import NO_VERSION, Ledger

BUDGET = 40
ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=12)


def test_a_token_keeps_the_experts_that_were_reported_first():
    ledger = Ledger([1, 2], 8)
    assert ledger.routes is None
    ledger.append_model([10, 11], [-1.0, -1.0])
    ledger.append_routes(np.zeros((3, 1, 2), np.int16))
    ledger.append_tool([20])
    ledger.append_model([12], [-1.0])
    ledger.append_routes(np.ones((5, 1, 2), np.int16))
    assert ledger.routes is not None and ledger.routes.shape == (5, 1, 2)
    assert ledger.routes[:, 0, 0].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(AssertionError, match="5 routes for a context of 7 tokens"):
        ledger.append_model([13], [-1.0])
        ledger.append_routes(np.ones((5, 1, 2), np.int16))


def test_an_engine_that_continued_another_context_is_caught():
    with pytest.raises(AssertionError, match="continued 5 tokens"):
        Ledger([1, 2], 8).append_model([10], [-1.0], context_tokens=5)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of appends against a list of what was appended."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger([7, 8, 9], BUDGET)
        self.rows: list[tuple[int, int, float, int]] = []
        self.contexts: list[list[int]] = []

    @rule(tokens=ids, version=st.integers(0, 9))
    def model(self, tokens: list[int], version: int) -> None:
        tokens = tokens[: self.ledger.budget_tokens]
        if tokens:
            self.contexts.append(self.ledger.context)
            self.ledger.append_model(tokens, [-0.5] * len(tokens), version=version, context_tokens=3 + len(self.rows))
            self.rows += [(token, 1, -0.5, version) for token in tokens]

    @precondition(lambda self: self.ledger.loss_mask and self.ledger.loss_mask[-1])
    @rule(tokens=ids)
    def tool(self, tokens: list[int]) -> None:
        tokens = tokens[: self.ledger.budget_tokens]
        if tokens:
            self.ledger.append_tool(tokens)
            self.rows += [(token, 0, 0.0, NO_VERSION) for token in tokens]

    @invariant()
    def columns_hold_what_was_appended(self) -> None:
        ledger = self.ledger
        columns = (ledger.response_ids, ledger.loss_mask, ledger.logprobs, ledger.versions)
        assert list(zip(*columns, strict=True)) == self.rows

    @invariant()
    def every_context_sent_is_a_prefix_of_the_end(self) -> None:
        final = self.ledger.context
        assert all(final[: len(context)] == context for context in self.contexts)


TestLedgerMachine = LedgerMachine.TestCase
