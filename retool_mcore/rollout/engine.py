"""The loop's interface to a generation engine: token ids in, token ids and log-probs out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from retool_mcore.errors import RolloutError
from retool_mcore.platforms.call_end import TABLE, TURN_TOKENS, CallEnd

Routes = npt.NDArray[np.int16]  # [T, L, K]: indices of the K experts of each token in each layer
TRAINING = "train"  # distinguishes training samples from evaluation samples in trajectory_seed


class EngineUnavailable(RolloutError):
    """The engine did not answer after retries. The loop drops the trajectory.

    A request that the engine rejects raises RolloutError instead.
    """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters.

    ``top_k`` = -1 samples from the whole vocabulary. ``seed`` makes samples reproducible if the
    engine supports it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


def trajectory_seed(run_seed: int, *which: object) -> int:
    """The seed in [0, 2**31) for all turns of one trajectory: a pure function of its arguments.

    ``which`` identifies the trajectory. In validation and evaluation: the problem index and the
    sample index. In training: TRAINING, the step that started the trajectory, the row and the
    sample.
    """
    return crc32("/".join(map(str, (run_seed, *which))).encode()) & 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A request for one turn: continue ``token_ids`` [T] up to a stop token or ``max_new_tokens``.

    The output includes the stop token. ``trajectory_id`` routes all turns of a trajectory to the
    same replica, whose prefix cache has the earlier turns. ``call_end``: an engine that supports it
    keeps sampling after a stop token that completes no call. Other engines stop there, and the loop
    sends another request. ``turn_tokens``: how many tokens at the end of ``token_ids`` belong to
    this turn because earlier requests sampled them.
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
        """SGLang's custom_params for ``call_end``; {} if it is None."""
        return {} if self.call_end is None else {TABLE: self.call_end.as_json, TURN_TOKENS: self.turn_tokens}


@dataclass(frozen=True, kw_only=True)
class EngineTurn:
    """The engine's response: sampled ``token_ids`` [T] and their ``logprobs`` [T] in nats.

    The log-probs are those of the distribution that the tokens were sampled from.

    ``stop``: "stop" if the last token is a stop token; "length" if max_new_tokens or the engine's
    context length is reached; "abort" if the engine was interrupted, as by a weight sync. After an
    abort the loop requests the rest of the turn.
    ``version``: the weights that sampled the tokens: the training step of the last weight sync, or
    the server's weight_version; 0 if unknown.
    ``context_tokens``: the context length C as the engine counts it.
    ``cached_tokens``: how many of these hit the prefix cache. Both are None if not reported.
    ``routes`` [C + T - 1, L, K], int16: for an MoE model, the experts of each token in each layer.
    The last sampled token has none yet, because the model has not processed it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop: Literal["stop", "length", "abort"]
    version: int = 0
    context_tokens: int | None = None
    cached_tokens: int | None = None
    routes: Routes | None = None


class Engine(Protocol):
    """A generation engine. It serves any number of concurrent requests."""

    async def generate(self, request: TurnRequest) -> EngineTurn:
        """Sample one turn, or the rest of one; see ``EngineTurn.stop``.

        Raises EngineUnavailable if the engine is unreachable or fails, after retries.
        """
        ...
