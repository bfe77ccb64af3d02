"""The token-exact record of one trajectory.

The ledger contains the tokens that the engine sampled, the tokens written between turns, and the
weight version that sampled each token. Every request sends ``Ledger.context`` to the engine, and
every sampled token is appended to the ledger. The trainer therefore trains on exactly the sampled
tokens: nothing is decoded and tokenized again. Only routes need NumPy; the rest is pure Python.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

import numpy as np

NO_VERSION = -1  # weight version of tokens that the model did not sample


class StopReason(StrEnum):
    """Why a trajectory stopped.

    For every reason but DROPPED, the loss mask is 1 on all sampled tokens. A dropped trajectory has
    no reward and does not enter the batch.

    ============ =============================================================== =================
    reason       what happened                                                   reward
    ============ =============================================================== =================
    FINISHED     the model ended a turn without a call                           graded by answer
    LENGTH       the response budget ran out within a model turn                 graded by answer
    NO_ROOM      the next tool result or parse error, plus a further turn, did   wrong: no answer
                 not fit; it was not appended
    TURNS        the last allowed turn ended in a call, which was not run        wrong: no answer
    MALFORMED    too many malformed calls in a row                               wrong: no answer
    TOOL_TIME    the run times of its calls reached ``Limits.max_tool_s``        wrong: no answer
    DROPPED      the sandbox or the engine failed, after retries                 none
    ============ =============================================================== =================

    LENGTH: a cut turn without a boxed answer is wrong. A single call that fails, is malformed or
    hits a sandbox limit does not end the trajectory; the model reads the error as text.
    ``algorithm.mask`` may exclude whole responses from the loss, but leaves the ledger unchanged.
    """

    FINISHED = "finished"
    LENGTH = "length"
    NO_ROOM = "no_room"
    TURNS = "turns"
    MALFORMED = "malformed_calls"
    TOOL_TIME = "tool_time"
    DROPPED = "dropped"


class Ledger:
    """Prompt and response tokens of one trajectory. Append-only; each append asserts invariants.

    ``response_ids``, ``loss_mask``, ``logprobs`` (nats) and ``versions`` have one entry per
    response token. Sampled tokens have loss mask 1. Tool tokens have loss mask 0, logprob 0.0 and
    version ``NO_VERSION``. A text conversation (a model behind a chat API) leaves the ledger empty.
    """

    def __init__(self, prompt_ids: Sequence[int], max_response_tokens: int) -> None:
        assert max_response_tokens > 0, f"max_response_tokens = {max_response_tokens} leaves nothing to sample"
        self.prompt_ids = list(prompt_ids)
        self.max_response_tokens = max_response_tokens
        self.response_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._routes: list[Any] = []  # chunks [t, L, K]; concatenated, they cover a prefix of the context
        self.stop_reason: StopReason | None = None

    @property
    def context(self) -> list[int]:
        """Token ids [T] to send to the engine: the prompt and the response so far."""
        return self.prompt_ids + self.response_ids

    @property
    def budget_tokens(self) -> int:
        """Number of response tokens that may still be appended."""
        return self.max_response_tokens - len(self.response_ids)

    @property
    def turns(self) -> int:
        """Number of model turns and tool turns, which alternate."""
        return sum(1 for _ in groupby(self.loss_mask))

    @property
    def model_tokens(self) -> int:
        return sum(self.loss_mask)

    def append_model(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        version: int = 0,
        context_tokens: int | None = None,
    ) -> None:
        """Append sampled tokens with their log-probs (nats) and weight version.

        Consecutive calls extend the same turn, as after an abort.
        ``context_tokens``: the context length that the engine reports, or None. It must equal the
        ledger's.
        """
        assert len(token_ids) == len(logprobs), f"{len(token_ids)} tokens but {len(logprobs)} logprobs"
        assert context_tokens in (None, len(self.prompt_ids) + len(self.response_ids)), (
            f"the engine continued {context_tokens} tokens, the ledger has "
            f"{len(self.prompt_ids)} + {len(self.response_ids)}"
        )
        assert version >= 0, f"version {version} of sampled tokens is negative"
        self._append(token_ids, logprobs, loss=1, version=version)

    def append_tool(self, token_ids: Sequence[int]) -> None:
        """Append the tokens between two model turns, with loss mask 0.

        With chat-template protocols, these are the end-of-turn token if the model did not sample
        it, the tool results, and the header of the next model turn.
        """
        assert self.loss_mask and self.loss_mask[-1] == 1, "a tool turn must follow a model turn"
        self._append(token_ids, [0.0] * len(token_ids), loss=0, version=NO_VERSION)

    def append_routes(self, routes: Any) -> None:
        """Append the MoE routes of new tokens from ``routes`` [T - 1, L, K], int16 expert indices.

        T is the context length, L the layers, K the experts per token. Each token keeps the experts
        from the first request that reported them. After a weight sync the engine recomputes earlier
        tokens and may route them to experts other than those they were sampled with.
        """
        count, known = len(routes), sum(map(len, self._routes))
        assert count == len(self.context) - 1, f"{count} routes for a context of {len(self.context)} tokens"
        self._routes.append(routes[known:])

    @property
    def routes(self) -> Any | None:
        """Expert indices [T, L, K] of the first T context tokens; None if the engine sent none."""
        return np.concatenate(self._routes) if self._routes else None

    def close(self, reason: StopReason) -> None:
        """Set the stop reason. Later appends fail."""
        assert self.stop_reason is None, f"already closed: {self.stop_reason}"
        self.stop_reason = reason

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[float], loss: int, version: int) -> None:
        assert self.stop_reason is None, f"append to a trajectory closed by {self.stop_reason}"
        assert token_ids, "an empty turn"
        assert len(token_ids) <= self.budget_tokens, (
            f"{len(token_ids)} tokens exceed the budget: {len(self.response_ids)} of {self.max_response_tokens} "
            "response tokens are used"
        )
        self.response_ids.extend(token_ids)
        self.loss_mask.extend([loss] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))
