"""Estimators over k samples per problem.

mean, best, worst and maj equal verl's validation metrics exactly, with the same random draws. verl
(trainer/ppo/metric_utils.py) estimates best@n, worst@n and maj@n with 1000 draws of n samples with
replacement, seed 42, for n = 2, 4, ... and k, per problem, and averages over problems. pass@k is
the unbiased estimator of Chen et al. 2021 (https://arxiv.org/abs/2107.03374), without replacement.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

VERL_DRAWS = 1000
VERL_SEED = 42
INTERVAL_DRAWS = 10_000
DRAWS_AT_ONCE = 100  # 10 MB for a thousand problems with 13 metrics
INTERVAL = 0.95
Z = 1.959964  # two-sided normal quantile for INTERVAL


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The k samples of one problem: ``scores`` [k] and ``votes`` [k].

    A vote is the normalised answer, or None without an answer.
    """

    scores: Sequence[float]
    votes: Sequence[Hashable]

    def __post_init__(self) -> None:
        assert len(self.scores) == len(self.votes) > 0, f"{len(self.scores)} scores, {len(self.votes)} votes"


def summarize(problems: Sequence[Samples]) -> dict[str, float]:
    """mean@k, best@n, worst@n, maj@n and pass@n, averaged over problems with k samples each.

    Each estimate NAME also has a 95 % interval, NAME/low and NAME/high.
    """
    k = len(problems[0].scores)
    assert all(len(problem.scores) == k for problem in problems), "problems have different numbers of samples"
    draws = {n: _draws(k, n) for n in sizes(k)}
    rows = [_estimates(problem, draws) for problem in problems]
    names = list(rows[0])
    values_PM = np.array([[row[name] for name in names] for row in rows])
    lows, highs = rate_intervals(values_PM)
    out: dict[str, float] = {}
    for name, value, low, high in zip(names, values_PM.mean(axis=0), lows, highs, strict=True):
        out |= {name: float(value), f"{name}/low": float(low), f"{name}/high": float(high)}
    return out


def _estimates(problem: Samples, draws: Mapping[int, np.ndarray]) -> dict[str, float]:
    """All estimates of one problem, by metric name."""
    k, right = len(problem.scores), sum(score > 0 for score in problem.scores)
    out = {f"mean@{k}": float(np.mean(problem.scores))}
    for n, drawn in draws.items():
        out |= {f"{name}@{n}": value for name, value in _at(problem, drawn).items()}
    return out | {f"pass@{n}": pass_at(k, right, n) for n in (1, *draws)}


def sizes(k: int) -> list[int]:
    """verl's values of n for best@n: powers of two from 2 to below k, and k; [] for k = 1."""
    return [*(2**power for power in range(1, k.bit_length()) if 2**power < k), *([k] if k > 1 else [])]


def pass_at(k: int, correct: int, n: int) -> float:
    """Probability that n of k samples, drawn without replacement, include a correct one."""
    return 1.0 - math.comb(k - correct, n) / math.comb(k, n)


def interval(means: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of ``means`` [P], resampling problems."""
    lows, highs = intervals(means[:, None])
    return float(lows[0]), float(highs[0])


def rate_intervals(values_PM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``intervals`` of rates [P, M] in [0, 1], with Wilson's interval if all rates are 0 or all 1.

    Resampling equal values would give an interval of width 0.
    """
    lows, highs = intervals(values_PM)
    margin = Z**2 / (len(values_PM) + Z**2)
    highs = np.where((values_PM == 0.0).all(axis=0), margin, highs)
    lows = np.where((values_PM == 1.0).all(axis=0), 1.0 - margin, lows)
    return lows, highs


def intervals(values_PM: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``interval`` of M metrics, with the same draws of P problems: (lows [M], highs [M])."""
    problems = len(values_PM)
    generator = np.random.default_rng(seed)
    means_DM = np.concatenate(
        [
            values_PM[generator.integers(problems, size=(DRAWS_AT_ONCE, problems))].mean(axis=1)
            for _ in range(INTERVAL_DRAWS // DRAWS_AT_ONCE)
        ]
    )
    lows, highs = np.quantile(means_DM, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    return lows, highs


def _draws(k: int, n: int) -> np.ndarray:
    # The legacy generator, because verl re-seeds NumPy's global generator for each problem and
    # metric.
    return np.random.RandomState(VERL_SEED).choice(k, size=(VERL_DRAWS, n), replace=True)


def _at(problem: Samples, draws_DN: np.ndarray) -> dict[str, float]:
    scores = np.asarray(problem.scores, dtype=np.float64)
    drawn_DN = scores[draws_DN]
    return {
        "best": float(drawn_DN.max(axis=1).mean()),
        "worst": float(drawn_DN.min(axis=1).mean()),
        "maj": _majority(problem.votes, scores, draws_DN),
    }


def _majority(votes: Sequence[Hashable], scores: np.ndarray, draws_DN: np.ndarray) -> float:
    """The mean over D draws of n samples of the score of the most frequent vote.

    It is that vote's first drawn score. Ties go to the vote that was drawn first.
    """
    codes = np.array([votes.index(vote) for vote in votes])  # equal votes have equal codes
    votes_DN = codes[draws_DN]
    counts_DN = (votes_DN[:, :, None] == votes_DN[:, None, :]).sum(axis=2)
    first_D = counts_DN.argmax(axis=1)  # argmax returns the first maximum
    return float(scores[np.take_along_axis(draws_DN, first_D[:, None], axis=1)].mean())
