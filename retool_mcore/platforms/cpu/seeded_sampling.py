"""SGLang's sampling on the CPU with one seed per request, independent of the rest of the batch.

SGLang itself supports per-request seeds only in deterministic mode, which needs Triton kernels.
"""

import functools
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

BITS = 48  # random bits per draw


def uniform(seed: int, position: int) -> float:
    """A pseudo-random number in [0, 1) for the token at ``position`` of a request with ``seed``."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=BITS // 8).digest()
    return int.from_bytes(digest, "big") / 2**BITS


def multinomial_with_seed(logprobs_NV: torch.Tensor, seed_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Sample a token from each row's distribution, by its seed and position.

    Args:
        logprobs_NV: [N, V] float, log-probs up to a constant.
        seed_N: [N] int.
        positions_N: [N] int.

    Returns:
        Token indices, int64 [N, 1].
    """
    draws = [uniform(seed, position) for seed, position in zip(seed_N.tolist(), positions_N.tolist(), strict=True)]
    cumulated_NV = logprobs_NV.double().exp().cumsum(dim=-1)
    total_N1 = cumulated_NV[:, -1:]
    wanted_N1 = torch.tensor(draws, dtype=torch.float64).unsqueeze(-1) * total_N1
    return torch.searchsorted(cumulated_NV, wanted_N1, right=True)


def with_seeds(original: Any) -> Any:
    """Wrap SamplingBatchInfo.from_schedule_batch: a request without a seed gets a random one."""
    make: Callable[..., Any] = original.__func__

    @functools.wraps(make)
    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = make(cls, batch, vocab_size)
        requested = [request.sampling_params.sampling_seed for request in batch.reqs]
        drawn = torch.randint(2**31, (len(requested),)).tolist()
        seeds = [random if seed is None else seed for seed, random in zip(requested, drawn, strict=True)]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    return classmethod(from_schedule_batch)
