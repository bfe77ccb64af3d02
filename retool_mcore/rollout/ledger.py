"""The record of one trajectory, exact to the token.

It holds the tokens that the engine sampled, the tokens written between turns, and the version of
the weights. Pure Python. The engine is only ever sent ``Ledger.context``, and what it samples is
only ever appended, so the tokens trained on are the tokens sampled: nothing is decoded and encoded
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np

NO_VERSION = -1  # of tokens that no model sampled


class StopReason(StrEnum):
    """Why a trajectory ended. The mask keeps every sampled token in each case but ``DROPPED``.

    ============ =========================================== ================== ===================
    reason       what happened                               mask               reward
    ============ =========================================== ================== ===================
    FINISHED     the model closed a turn without a call      all sampled tokens by its answer
    LENGTH       the response budget ended in a model turn   all sampled tokens by its answer, if
                                                                                the cut turn boxed
                                                                                one
    NO_ROOM      the next tool result, or the error of a     all sampled tokens wrong: no answer
                 malformed call, did not fit with a turn
                 after it: the model never saw it
    TURNS        the last allowed turn ended in a call,      all sampled tokens wrong: no answer
                 which is not run
    MALFORMED    too many malformed calls in a row           all sampled tokens wrong: no answer
    TOOL_TIME    the trajectory's interpreter time is used   all sampled tokens wrong: no answer
                 up
    DROPPED      sandbox or engine failed, after retries     not in the batch   none
    ============ =========================================== ================== ===================

    When a call fails, is malformed, or is stopped at a limit of the sandbox, the model sees that as
    text. algorithm.mask leaves whole responses out of the loss; the
    ledger keeps their masks as they are.
    """

    FINISHED = "finished"
    LENGTH = "length"
    NO_ROOM = "no_room"
    TURNS = "turns"
    MALFORMED = "malformed_calls"
    TOOL_TIME = "tool_time"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Span:
    """Response tokens [start, end) that belong to one turn."""

    role: Literal["model", "tool"]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Ledger:
    """Prompt and response of one trajectory. Append only; each append asserts the invariants.

    The ledger of a conversation in text stays empty.

    response_ids, loss_mask, logprobs and versions have one entry per response token. Tool tokens
    carry loss 0, logprob 0.0 and version ``NO_VERSION``.
    """

    def __init__(self, prompt_ids: Sequence[int], max_response_tokens: int) -> None:
        assert max_response_tokens > 0, f"max_response_tokens = {max_response_tokens} leaves nothing to sample"
        self.prompt_ids = list(prompt_ids)
        self.max_response_tokens = max_response_tokens
        self.response_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.spans: list[Span] = []
        self._routes: list[Any] = []  # of the tokens up to some position, in pieces
        self.stop_reason: StopReason | None = None

    @property
    def context(self) -> list[int]:
        """Token ids [T] that the engine continues: the prompt and the response so far."""
        return self.prompt_ids + self.response_ids

    @property
    def budget_tokens(self) -> int:
        """Response tokens that may still be appended."""
        return self.max_response_tokens - len(self.response_ids)

    @property
    def model_turns(self) -> int:
        return sum(span.role == "model" for span in self.spans)

    @property
    def tool_turns(self) -> int:
        return sum(span.role == "tool" for span in self.spans)

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
        """Append what the engine sampled. A turn resumed after an abort continues its span.

        ``context_tokens``: the length of the context that the engine reports to have continued, or
        None.
        """
        assert len(token_ids) == len(logprobs), f"{len(token_ids)} tokens but {len(logprobs)} logprobs"
        assert context_tokens in (None, len(self.prompt_ids) + len(self.response_ids)), (
            f"the engine continued {context_tokens} tokens, the ledger holds "
            f"{len(self.prompt_ids)} + {len(self.response_ids)}"
        )
        assert version >= 0, f"version {version} of sampled tokens is negative"
        self._append("model", token_ids, logprobs, loss=1, version=version)

    def append_tool(self, token_ids: Sequence[int]) -> None:
        """Append what is written between two model turns.

        That is the closing token, the results, and the header of the next turn.
        """
        assert self.spans and self.spans[-1].role == "model", "a tool turn follows a model turn"
        self._append("tool", token_ids, [0.0] * len(token_ids), loss=0, version=NO_VERSION)

    def append_routes(self, routes: Any) -> None:
        """Keep what is new of the engine's ``routes`` [T - 1, L, K]; T is the context's length.

        A token keeps the experts that were first told. After an update of the weights the engine
        computes earlier tokens anew, and may send them to others than they were sampled with.
        """
        told, known = len(routes), sum(map(len, self._routes))
        assert told == len(self.context) - 1, f"{told} routes for a context of {len(self.context)} tokens"
        self._routes.append(routes[known:])

    @property
    def routes(self) -> Any | None:
        """The experts [T, L, K] of the first T tokens of the context; None if none were told."""
        return np.concatenate(self._routes) if self._routes else None

    def close(self, reason: StopReason) -> None:
        """End the trajectory; nothing can be appended any more."""
        assert self.stop_reason is None, f"already closed: {self.stop_reason}"
        self.stop_reason = reason

    def _append(
        self,
        role: Literal["model", "tool"],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        loss: int,
        version: int,
    ) -> None:
        assert self.stop_reason is None, f"append to a trajectory closed by {self.stop_reason}"
        assert token_ids, f"an empty {role} turn"
        assert len(token_ids) <= self.budget_tokens, (
            f"{len(token_ids)} {role} tokens exceed the budget: {len(self.response_ids)} of "
            f"{self.max_response_tokens} response tokens are used"
        )
        start = len(self.response_ids)
        if role == "model" and self.spans and self.spans[-1].role == "model":
            start = self.spans.pop().start
        self.response_ids.extend(token_ids)
        self.loss_mask.extend([loss] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))
        self.spans.append(Span(role, start, len(self.response_ids)))
        size = len(self.response_ids)
        assert size == len(self.loss_mask) == len(self.logprobs) == len(self.versions), "columns of unequal length"
