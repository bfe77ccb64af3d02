"""SGLang's sampling on the CPU by a seed of each request's own, whatever else is in its batch.

SGLang draws by such seeds in its deterministic mode only, whose kernels are Triton's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

BITS = 48  # of a draw


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) of the token at ``position`` of a request with this seed."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=BITS // 8).digest()
    return int.from_bytes(digest, "big") / 2**BITS


def multinomial_with_seed(logprobs_NV: torch.Tensor, seed_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Token indices [N, 1], each drawn from its row's distribution (log weights [N, V]) by its seed
    and position.
    """
    draws = [uniform(seed, position) for seed, position in zip(seed_N.tolist(), positions_N.tolist(), strict=True)]
    cumulated_NV = logprobs_NV.double().exp().cumsum(dim=-1)
    total_N1 = cumulated_NV[:, -1:]
    wanted_N1 = torch.tensor(draws, dtype=torch.float64).unsqueeze(-1) * total_N1
    return torch.searchsorted(cumulated_NV, wanted_N1, right=True)


def with_seeds(original: Any) -> Any:
    """SamplingBatchInfo.from_schedule_batch, with the seed that each request has; one without draws
    one.
    """
    make: Callable[..., Any] = original.__func__

    @functools.wraps(make)
    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = make(cls, batch, vocab_size)
        given = [request.sampling_params.sampling_seed for request in batch.reqs]
        drawn = torch.randint(2**31, (len(given),)).tolist()
        seeds = [ours if seed is None else seed for seed, ours in zip(given, drawn, strict=True)]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    return classmethod(from_schedule_batch)
