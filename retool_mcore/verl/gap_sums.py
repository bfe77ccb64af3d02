"""What engine and actor say of the same tokens, in sums that one pass over a step's rows makes.

The names are verl's; its functions take all rows at once, padded to the longest. Here rows come in
blocks [N tokens], one after the other, and what is kept does not grow with the tokens of a row.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

ENTROPY = "actor/entropy"
BOUND = 20.0  # of a log ratio, before it is squared; verl's
_LEAST, _MOST = math.exp(-BOUND), math.exp(BOUND)
_P99 = 0.99
_PIECE = 1 << 16
_OUTSIDE = np.array([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0])  # what a token outside of the loss adds to each sum
_NONE = torch.zeros(())
_BINS = 1 << 15  # of a gap's size, by the upper half of its bits: they have the order of the sizes

Numbers = npt.NDArray[np.float64]


class Gaps(Protocol):
    def add(self, gap_N: torch.Tensor, tokens: int) -> None:
        """``gap_N`` [N]: actor - rollout of ``tokens`` sampled tokens, and 0 at the others."""
        ...


class KeptGaps:
    """Sizes of the gaps of a worker's tokens, of which a driver asks what a percentile needs."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._sizes = list[torch.Tensor]()

    def add(self, gap_N: torch.Tensor, tokens: int) -> None:
        del tokens
        self._sizes.append(gap_N[gap_N != 0].abs().float())

    @property
    def _sizes_N(self) -> torch.Tensor:
        return torch.cat([torch.zeros(0), *self._sizes])

    def histogram(self) -> tuple[torch.Tensor, float]:
        """How many are in each bin, and the largest of all."""
        most = max((float(each.max()) for each in self._sizes if len(each)), default=0.0)
        return torch.bincount(_bins_of(self._sizes_N), minlength=_BINS), most

    def of_bin(self, number: int) -> torch.Tensor:
        sizes_N = self._sizes_N
        return sizes_N[_bins_of(sizes_N) == number]


def _bins_of(sizes_N: torch.Tensor) -> torch.Tensor:
    return sizes_N.view(torch.int32) >> 16


class Mismatch:
    """How far the engine that sampled is from the weights that are trained, over sampled tokens.

    mismatch/kl    mean of rollout - actor: estimates their divergence over sampled tokens
    mismatch/max, mismatch/p99    of |rollout - actor| over tokens, in nats

    The p-th percentile is the smallest value that p of 100 do not exceed. ``most_tokens``: no more
    than these are added. Only so many of the largest gaps are kept as a percentile of them needs.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._room = math.ceil((1 - _P99) * most_tokens) + 1
        self._largest, self._kept = list[torch.Tensor](), 0
        self._least = -1.0  # a gap up to here is not among the largest
        self._tokens, self._sum = 0, 0.0
        self._workers: Any = None

    def kept_by(self, workers: Any, tokens: int, total: float) -> None:
        """Gaps of ``tokens`` sampled ones, ``total`` in sum, are with ``workers``, as all are."""
        self._workers = workers
        self._tokens += tokens
        self._sum -= total

    def add(self, gap_N: torch.Tensor, tokens: int) -> None:
        self._tokens += tokens
        self._sum -= float(gap_N.sum(dtype=torch.float64))
        size_N = gap_N.abs()
        large_N = size_N[size_N > self._least]
        self._largest.append(large_N)
        self._kept += len(large_N)
        if self._kept > 2 * self._room:
            kept = torch.cat(self._largest).topk(self._room, sorted=False).values
            self._largest, self._kept, self._least = [kept], self._room, float(kept.min())

    def metrics(self) -> dict[str, float]:
        if not self._tokens:
            return {}
        assert self._tokens <= self._most_tokens, f"{self._tokens} tokens are more than {self._most_tokens}"
        place, kl = self._tokens - math.ceil(_P99 * self._tokens) + 1, self._sum / self._tokens
        if self._workers is not None:
            most, p99 = largest_of_workers(self._workers, place)
        else:
            largest = torch.cat(self._largest).topk(place).values
            most, p99 = float(largest[0]), float(largest[-1])
        return {"mismatch/kl": kl, "mismatch/max": most, "mismatch/p99": p99}


def largest_of_workers(workers: Any, place: int) -> tuple[float, float]:
    """The largest gap that ``workers`` keep, and the one at ``place`` from it, which is 1.

    They are asked twice: how many are in each bin, then for those of the bin that has the place.
    """
    told = [each for each in workers.gap_histogram() if each is not None]
    count_B = torch.stack([count_B for count_B, _ in told]).sum(0).flip(0)
    upto_B, most = count_B.cumsum(0), max(largest for _, largest in told)
    number = int(torch.searchsorted(upto_B, place))
    if number == _BINS:
        return most, 0.0
    inside_N = torch.cat([each for each in workers.gaps_of_bin(_BINS - 1 - number) if each is not None])
    return most, float(inside_N.topk(place - int(upto_B[number] - count_B[number])).values[-1])


def pieces(starts: npt.NDArray[np.int64], tokens: int) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
    """Rows that begin at ``starts`` [R], so few that what is computed of them stays in a cache.

    Of each piece its tokens, and where its rows begin in it.
    """
    ends, first = np.append(starts[1:], tokens), 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + _PIECE, side="right")))
        yield slice(int(starts[first]), int(ends[last - 1])), starts[first:last] - starts[first]
        first = last


class GapSums:
    """verl's training/rollout_* and rollout_corr/* of tokens in the loss, and their entropy.

    Of rollout_corr/* those that weigh and reject nothing. A response without a token in the loss
    counts nowhere; verl would count it as one on which engine and actor agree.
    """

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self._rows: list[Numbers] = []  # [3, R] of each block: tokens in the loss, sums of actor and engine
        self._sums, self._largest = np.zeros(len(_OUTSIDE)), 0.0
        self._tokens, self._entropy = 0, 0.0

    def add(
        self,
        actor_N: torch.Tensor,
        engine_N: torch.Tensor,
        mask_N: torch.Tensor,
        starts: npt.NDArray[np.int64],
        entropy_N: torch.Tensor | None = None,
    ) -> Numbers:
        """Log-probabilities and loss mask of rows that begin at ``starts`` [R] of a block.

        Without ``entropy_N`` it is estimated by -log p. Returns [R]: tokens in the loss.
        """
        counts = list[Numbers]()
        for piece, begins in pieces(starts, len(mask_N)):
            columns = (actor_N[piece], engine_N[piece], mask_N[piece].bool())
            counts.append(self._add_piece(*columns, begins, None if entropy_N is None else entropy_N[piece]))
        return np.concatenate(counts)

    def _add_piece(
        self,
        actor_N: torch.Tensor,
        engine_N: torch.Tensor,
        learnt_N: torch.Tensor,
        starts: npt.NDArray[np.int64],
        entropy_N: torch.Tensor | None,
    ) -> Numbers:
        actor_N, engine_N = torch.where(learnt_N, actor_N, _NONE), torch.where(learnt_N, engine_N, _NONE)
        counts, of_actor = _row_sums(learnt_N, starts), _row_sums(actor_N, starts)
        self._rows.append(np.stack([counts, of_actor, _row_sums(engine_N, starts)]))
        gap_N, tokens = actor_N - engine_N, int(counts.sum())
        self._gaps.add(gap_N, tokens)
        ratio_N, q_N = gap_N.exp(), engine_N.exp()
        p_N = q_N * ratio_N
        apart_N = (p_N - q_N).abs_()
        self._largest = max(self._largest, float(apart_N.max()))
        bounded_N = ratio_N.clamp(_LEAST, _MOST).double()
        p_N, q_N, apart_N = p_N.double(), q_N.double(), apart_N.double()
        ratio, of_p, of_q = ratio_N.sum(dtype=torch.float64), p_N.sum(), q_N.sum()
        squares = bounded_N @ bounded_N, p_N @ p_N, q_N @ q_N, p_N @ q_N, apart_N @ apart_N
        self._sums += torch.stack([ratio, of_p, of_q, apart_N.sum(), *squares]).numpy()
        # Outside of the loss each of p, q and the ratio is 1, and is taken off again.
        self._sums -= (len(learnt_N) - tokens) * _OUTSIDE
        self._tokens += tokens
        if entropy_N is None:
            self._entropy -= float(of_actor.sum())
        else:
            self._entropy += float(torch.where(learnt_N, entropy_N, _NONE).sum(dtype=torch.float64))
        return counts

    def numbers(self) -> Numbers:
        """[R, K]: what ``merge`` takes. Sums over all rows' tokens are in the first row."""
        rows_3R = np.concatenate(self._rows, axis=1)
        whole_RK = np.zeros((rows_3R.shape[1], len(_OUTSIDE) + 2))
        whole_RK[0] = *self._sums, self._entropy, self._largest
        return np.concatenate([rows_3R.T, whole_RK], axis=1)

    def merge(self, numbers_RK: Numbers) -> tuple[int, float]:
        """Add rows of others' ``numbers``; returns their tokens, and the sum of their gaps."""
        counts, actor, engine = rows_3R = numbers_RK[:, :3].T
        self._rows.append(rows_3R)
        self._sums += numbers_RK[:, 3:-2].sum(0)
        self._entropy += float(numbers_RK[:, -2].sum())
        self._largest = max(self._largest, float(numbers_RK[:, -1].max()))
        tokens = int(counts.sum())
        self._tokens += tokens
        return tokens, float((actor - engine).sum())

    def metrics(self) -> dict[str, float]:
        """Empty where no token is in the loss."""
        ratio, p, q, apart, squared, pp, qq, pq, apart2 = (float(value) for value in self._sums)
        n = self._tokens
        if not n:
            return {}
        counts, actor, engine = np.concatenate(self._rows, axis=1)
        some = counts > 0
        actor_R, engine_R, gap_R = actor[some] / counts[some], engine[some] / counts[some], (actor - engine)[some]
        apart_R = engine_R - actor_R
        kl = -float(gap_R.sum()) / n
        spread = math.sqrt(max(pp - p * p / n, 0.0)) * math.sqrt(max(qq - q * q / n, 0.0))
        corrected = {
            "kl": kl,
            "k3_kl": ratio / n - 1 + kl,
            "training_ppl": np.exp(-actor_R).mean(),
            "training_log_ppl": -actor_R.mean(),
            "rollout_ppl": np.exp(-engine_R).mean(),
            "rollout_log_ppl": -engine_R.mean(),
            "log_ppl_diff": apart_R.mean(),
            "log_ppl_abs_diff": np.abs(apart_R).mean(),
            "log_ppl_diff_max": apart_R.max(),
            "log_ppl_diff_min": apart_R.min(),
            "ppl_ratio": np.exp(apart_R).mean(),
            "chi2_token": squared / n - 1,
            "chi2_seq": np.exp(2 * np.clip(gap_R, -BOUND, BOUND)).mean() - 1,
        }
        return {
            ENTROPY: self._entropy / n,
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": self._largest,
            "training/rollout_probs_diff_mean": apart / n,
            "training/rollout_probs_diff_std": math.sqrt(max(apart2 - apart * apart / n, 0.0) / max(n - 1, 1)),
            "training/rollout_actor_probs_pearson_corr": (pq - p * q / n) / spread if spread else float("nan"),
            **{f"rollout_corr/{name}": float(value) for name, value in corrected.items()},
        }


def _row_sums(values_N: torch.Tensor, starts: npt.NDArray[np.int64]) -> Numbers:
    return np.add.reduceat(values_N.numpy(), starts, dtype=np.float64)
