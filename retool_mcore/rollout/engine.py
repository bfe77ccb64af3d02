"""The loop's interface to a generation engine: tokens in, tokens out, and why it stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from retool_mcore.errors import RolloutError
from retool_mcore.platforms.call_end import TABLE, TURN_TOKENS, CallEnd

Routes = npt.NDArray[np.int16]  # [T, L, K]: K experts of each token in each layer
TRAINING = "train"  # in trajectory_seed, marks a sample of training and not of an evaluation


class EngineUnavailable(RolloutError):
    """The engine did not answer, after retries. The trajectory is dropped.

    When the engine refuses a request, that is another error.
    """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    ``top_k`` -1: from the whole vocabulary. ``seed``: makes samples repeatable where the engine
    can.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


def trajectory_seed(run_seed: int, *which: object) -> int:
    """The seed [0, 2**31) of all turns of one trajectory, at any time and on any machine.

    ``which``: in validation and evaluation the numbers of the problem and of the sample; in
    training TRAINING, the step that started the trajectory, the row and the sample.
    """
    return crc32("/".join(map(str, (run_seed, *which))).encode()) & 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to sample: the engine continues ``token_ids`` [T] up to a stop token or the limit.

    A stop token is the turn's last token. ``trajectory_id``: turns of one trajectory go to the same
    replica, whose cache holds the earlier turns. ``call_end``: an engine that knows it goes on
    after a stop token that completes no call; the others stop, which is right, too.
    ``turn_tokens``: how many of ``token_ids`` the turn already has, sampled before an abort.
    """

    token_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    sampling: Sampling
    trajectory_id: str
    call_end: CallEnd | None = None
    turn_tokens: int = 0

    @property
    def custom_params(self) -> dict[str, Any]:
        """What SGLang's scheduler needs for ``call_end``; {} without one."""
        return {} if self.call_end is None else {TABLE: self.call_end.text, TURN_TOKENS: self.turn_tokens}


@dataclass(frozen=True, kw_only=True)
class EngineTurn:
    """What the engine sampled: token_ids [T] and the logprob [T] of each.

    The logprobs are those of the distribution that was sampled from. ``stop`` is "stop" when the
    last token is a stop token, "length" when max_new_tokens or the engine's context was used up,
    and "abort" when the engine was interrupted (a weight update); after an abort the turn continues
    from what was sampled. ``version`` counts weight updates. ``context_tokens`` is the length of
    the context as the engine counted it, and ``cached_tokens`` how many of these tokens were in its
    prefix cache; None where the engine does not report them. ``routes`` [C + T - 1, L, K]: of a
    model with experts, those that each token was sent to in each layer, for the C tokens of the
    context and all sampled ones but the last, which no later token has read yet.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop: Literal["stop", "length", "abort"]
    version: int = 0
    context_tokens: int | None = None
    cached_tokens: int | None = None
    routes: Routes | None = None


class Engine(Protocol):
    """One turn at a time, many trajectories at once."""

    async def generate(self, request: TurnRequest) -> EngineTurn:
        """Sample one turn.

        Raises EngineUnavailable when the engine cannot be reached or fails, after retries.
        """
        ...
