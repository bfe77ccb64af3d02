"""What the loop needs of a generation engine: tokens in, tokens out, and why it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from zlib import crc32

from retool_mcore.errors import RolloutError

TRAINING = "train"  # of trajectory_seed: no sample of an evaluation


class EngineUnavailable(RolloutError):
    """The engine did not answer, after retries. The trajectory is dropped; the engine's refusals
    are other errors.
    """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. ``top_k`` -1: the whole vocabulary. ``seed``: repeatable, where the
    engine can.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


def trajectory_seed(run_seed: int, *which: object) -> int:
    """The seed [0, 2**31) of all turns of one trajectory, the same whenever and wherever it is
    sampled.

    ``which``: of validation and evaluation the problem's number and the sample's, of training
    TRAINING, the step that started it, the row and the sample.
    """
    return crc32("/".join(map(str, (run_seed, *which))).encode()) & 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to sample: ``token_ids`` [T] is continued until a stop token, which is the turn's
    last, or the limit.

    ``trajectory_id``: turns of one trajectory go to the same replica, whose cache holds the earlier
    ones.
    """

    token_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    sampling: Sampling
    trajectory_id: str


@dataclass(frozen=True, kw_only=True)
class EngineTurn:
    """What the engine sampled: token_ids [T] and the logprob [T] of each under the sampled
    distribution's policy.

    ``stop`` is "stop" when the last token is a stop token, "length" when max_new_tokens or the
    engine's context was used up, "abort" when the engine was interrupted (a weight update): the
    turn goes on from what was sampled. ``version`` counts weight updates; ``context_tokens`` is the
    length of the context as the engine counted it, and ``cached_tokens`` how many of it were in its
    prefix cache. None: the engine does not say.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop: Literal["stop", "length", "abort"]
    version: int = 0
    context_tokens: int | None = None
    cached_tokens: int | None = None


class Engine(Protocol):
    """One turn at a time, many trajectories at once."""

    async def generate(self, request: TurnRequest) -> EngineTurn:
        """Sample one turn. Raises EngineUnavailable when the engine cannot be reached or fails,
        after retries.
        """
        ...
