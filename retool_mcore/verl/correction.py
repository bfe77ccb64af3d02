"""Weights and rejection of tokens by the ratio of actor and engine, over rows that come in blocks.

verl's functions take all rows at once, padded to the longest. Here each row is weighed and judged
where it is; its numbers are kept, and of its tokens nothing but sums. The names of the metrics are
verl's. A response without a token in the loss counts nowhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retool_mcore.config import Algorithm
from retool_mcore.verl.gap_sums import BOUND, pieces

WEIGHTS = "rollout_is_weights"  # verl's column
Numbers = npt.NDArray[Any]


class Correction:
    """What algorithm.importance_sampling and algorithm.rejection make of tokens in the loss."""

    def __init__(self, algorithm: Algorithm) -> None:
        a = algorithm
        self.weighs, self.rejects = a.importance_sampling != "off", a.rejection != "off"
        self._by_row = a.importance_sampling == "sequence"
        self._rejection = a.rejection
        self._of_ratio = a.rejection.endswith("k1")
        self._lowest, self._highest = a.importance_bounds
        low, high = -math.inf, a.rejection_bounds[1]
        if self._of_ratio:
            low, high = map(math.log, a.rejection_bounds)
        self._weights = _Spread(self._lowest or 1 / self._highest, self._highest, 0.0)
        self._judged = _Spread(low, high, low if self._of_ratio else 0.0)
        self._outside, self._rejected, self._touched = 0.0, 0.0, 0

    def of_rows(
        self, gap_N: torch.Tensor, mask_N: torch.Tensor, starts: npt.NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        """Columns [N] to store: the loss mask after rejection, and weights if tokens are weighed.

        ``gap_N``: actor - engine of rows that begin at ``starts`` [R].
        """
        columns = {"response_mask": mask_N.clone()} if self.rejects else dict[str, torch.Tensor]()
        if self.weighs:
            columns[WEIGHTS] = torch.zeros_like(gap_N)
        if not columns:
            return columns
        for tokens, begins in pieces(starts, len(mask_N)):
            learnt_N = mask_N[tokens].bool()
            counts_R = np.add.reduceat(learnt_N.numpy(), begins, dtype=np.int64)
            rows = _Rows(gap_N[tokens][learnt_N], counts_R)
            if not rows.counts.size:
                continue
            if self.weighs:
                columns[WEIGHTS][tokens][learnt_N] = self._weigh(rows)
            if self.rejects:
                columns["response_mask"][tokens][learnt_N] = self._judge(rows).to(mask_N.dtype)
        return columns

    def _weigh(self, rows: _Rows) -> torch.Tensor:
        """[L]: the weight of each token in the loss."""
        if self._by_row:
            sums = np.clip(rows.sums(rows.whole_gap_L), -BOUND, BOUND)
            raw = torch.from_numpy(np.exp(sums)).to(rows.gap_L.dtype)
        else:
            raw = rows.gap_L.exp()
        weight = raw.clamp(max=self._highest)
        outside = (raw < self._lowest) | (raw > self._highest)
        if self._lowest:
            weight = torch.where(outside, torch.zeros_like(raw), raw)
        told = raw if self._by_row else weight
        self._weights.add(rows, weight, judged=raw, extremes=told, by_row=self._by_row)
        self._outside += float((outside * torch.from_numpy(rows.counts)).sum() if self._by_row else outside.sum())
        return rows.spread(weight) if self._by_row else weight

    def _judge(self, rows: _Rows) -> torch.Tensor:
        """[L]: whether each token in the loss stays there."""
        scope, _, estimate = self._rejection.rpartition("_")
        gap_L = rows.gap_L
        if estimate == "k1":
            value = -gap_L
        elif estimate == "k2":
            value = 0.5 * gap_L**2
        else:
            value = gap_L.exp() - 1.0 - gap_L
        by_row = scope != "token"
        if by_row:
            value = torch.from_numpy(rows.reduced(value, scope)).to(gap_L.dtype)
        self._judged.add(rows, value, judged=value, extremes=value, by_row=by_row)
        kept = (value >= self._judged.low) & (value <= self._judged.high)
        kept_L = rows.spread(kept) if by_row else kept
        self._rejected += float((~kept_L).sum())
        self._touched += int((rows.sums(~kept_L) > 0).sum())
        return kept_L

    def metrics(self) -> dict[str, float]:
        """verl's rollout_corr/* of weights and rejection; empty where no token is in the loss."""
        told: dict[str, float] = {}
        if self.weighs and self._weights.tokens:
            told |= {f"rollout_is_{name}": value for name, value in self._of_weights().items()}
        if self.rejects and self._judged.tokens:
            of_option = self._of_rejection()
            told |= {f"rollout_rs_{self._rejection}_{name}": value for name, value in of_option.items()}
            told |= {f"rollout_rs_{name}": of_option[name] for name in ("masked_fraction", "seq_masked_fraction")}
        return {f"rollout_corr/{name}": float(value) for name, value in told.items()}

    def _of_weights(self) -> dict[str, float]:
        weights, told = self._weights, self._weights.metrics(ideal=1.0)
        told["ratio_fraction_high"], told["ratio_fraction_low"] = told.pop("fraction_high"), told.pop("fraction_low")
        mean, squares = weights.clamped / weights.tokens, weights.squares / weights.tokens
        told["eff_sample_size"] = (mean + 1e-8) ** 2 / squares if squares else 0.0
        if self._lowest:
            told["oob_ratio"] = self._outside / weights.tokens
        return told

    def _of_rejection(self) -> dict[str, float]:
        judged, told = self._judged, self._judged.metrics(ideal=0.0)
        if not self._of_ratio:
            del told["seq_fraction_low"]
        told["masked_fraction"] = self._rejected / judged.tokens
        told["seq_masked_fraction"] = self._touched / judged.num_rows
        return told


class _Rows:
    """Tokens in the loss [L] of the rows [R] that have some, one row after the other."""

    def __init__(self, gap_L: torch.Tensor, counts_R: Numbers) -> None:
        self.whole_gap_L, self.gap_L = gap_L, gap_L.clamp(-BOUND, BOUND)
        self.counts = counts_R[counts_R > 0]
        self._starts = np.cumsum(self.counts) - self.counts

    def sums(self, values_L: torch.Tensor) -> Numbers:
        return np.add.reduceat(values_L.numpy(), self._starts, dtype=np.float64)

    def means(self, values_L: torch.Tensor) -> Numbers:
        return self.sums(values_L) / self.counts

    def reduced(self, values_L: torch.Tensor, scope: str) -> Numbers:
        if scope == "seq_max":
            return np.maximum.reduceat(values_L.numpy(), self._starts)
        return self.sums(values_L) if scope == "seq_sum" else self.means(values_L)

    def spread(self, values_R: torch.Tensor) -> torch.Tensor:
        """[L]: of each token its row's value."""
        return values_R.repeat_interleave(torch.from_numpy(self.counts))


class _Spread:
    """How a number of each token or of each row spreads, and what of it is below or above bounds.

    ``floor``: what is less counts as this in the deviation, and what is above ``high`` as that.
    """

    def __init__(self, low: float, high: float, floor: float) -> None:
        self.low, self.high, self._floor = low, high, floor
        self.tokens, self._entries, self.num_rows = 0, 0, 0
        self._total = self.clamped = self.squares = 0.0
        self._below = self._above = 0
        self._least, self._most = math.inf, -math.inf
        self._rows: list[Numbers] = []  # [2, R] of each piece: of the number, and of what is judged

    def add(
        self, rows: _Rows, values: torch.Tensor, *, judged: torch.Tensor, extremes: torch.Tensor, by_row: bool
    ) -> None:
        """``values`` [R] if ``by_row``, else [L]; ``judged`` is held against the bounds."""
        weight = torch.from_numpy(rows.counts) if by_row else torch.ones((), dtype=torch.int64)
        wide = values.double()
        bounded = wide.clamp(self._floor, self.high)
        self._total += float((wide * weight).sum())
        self.clamped += float((bounded * weight).sum())
        self.squares += float((bounded.square() * weight).sum())
        self.tokens += int(rows.counts.sum())
        self._entries += len(values)
        self.num_rows += len(rows.counts)
        self._below += int((judged < self.low).sum())
        self._above += int((judged > self.high).sum())
        self._least, self._most = min(self._least, float(extremes.min())), max(self._most, float(extremes.max()))
        of_rows = [each.double().numpy() if by_row else rows.means(each) for each in (values, judged)]
        self._rows.append(np.stack(of_rows))

    def metrics(self, ideal: float) -> dict[str, float]:
        values_R, judged_R = np.concatenate(self._rows, axis=1)
        mean = self.clamped / self.tokens
        variance = max(self.squares / self.tokens - mean**2, 0.0) if self.tokens > 1 else 0.0
        return {
            "mean": self._total / self.tokens,
            "std": math.sqrt(variance),
            "min": self._least,
            "max": self._most,
            "fraction_high": self._above / self._entries,
            "fraction_low": self._below / self._entries,
            "seq_mean": values_R.mean(),
            "seq_std": values_R.std(ddof=1) if len(values_R) > 1 else 0.0,
            "seq_min": values_R.min(),
            "seq_max": values_R.max(),
            "seq_max_deviation": np.abs(values_R - ideal).max(),
            "seq_fraction_high": (judged_R > self.high).mean(),
            "seq_fraction_low": (judged_R < self.low).mean(),
        }
