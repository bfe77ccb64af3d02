"""Advantages that differ within a response: of a critic's values, and of discounted rewards.

They are normalized over the tokens of all rows, so a step's rows are read twice: once for what a
token can still expect, once to normalize it. Interpreter's tokens are left out: what comes after
one is the next of what comes before it. Names end in N tokens, or in L tokens in the loss.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from retool_mcore.verl.blocks import Block

_LEAST_VARIANCE = 1e-8  # verl's


class Whitening:
    """verl's masked_whiten, with sums of what comes block by block."""

    def __init__(self) -> None:
        self._tokens, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """``tokens``: how many each value stands for; 1 if left out."""
        wide = values.double()
        counts = torch.ones((), dtype=torch.float64) if tokens is None else tokens.double()
        self._tokens += len(values) if tokens is None else int(tokens.sum())
        self._sum += float((wide * counts).sum())
        self._squares += float((wide.square() * counts).sum())

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        mean = self._sum / max(self._tokens, 1)
        variance = max(self._squares - mean * self._sum, 0.0) / max(self._tokens - 1, 1)
        return ((values.double() - mean) / math.sqrt(variance + _LEAST_VARIANCE)).to(values.dtype)


def discounted(reward_N: torch.Tensor, block: Block, learnt_N: torch.Tensor, gamma: float) -> torch.Tensor:
    """[N]: what each token in the loss and those after it are rewarded; 0 at the others."""
    return _placed(_from_the_end(reward_N[learnt_N], _ends(block, learnt_N), gamma), learnt_N)


def generalized(
    reward_N: torch.Tensor, value_N: torch.Tensor, block: Block, learnt_N: torch.Tensor, *, gamma: float, lam: float
) -> torch.Tensor:
    """[N]: GAE of each token in the loss before it is normalized; 0 at the others."""
    ends = _ends(block, learnt_N)
    value_L = value_N[learnt_N].double()
    after_L = torch.cat([value_L[1:], torch.zeros(1, dtype=torch.float64)])
    after_L[torch.from_numpy(ends[ends > 0] - 1)] = 0.0  # nothing comes after a row's last
    delta_L = reward_N[learnt_N].double() + gamma * after_L - value_L
    return _placed(_from_the_end(delta_L, ends, gamma * lam), learnt_N).to(value_N.dtype)


def _ends(block: Block, learnt_N: torch.Tensor) -> npt.NDArray[np.int64]:
    """Where each row ends among the tokens in the loss [R]."""
    return np.cumsum(np.add.reduceat(learnt_N.numpy(), block.starts, dtype=np.int64))


def _placed(values_L: torch.Tensor, learnt_N: torch.Tensor) -> torch.Tensor:
    values_N = torch.zeros(len(learnt_N), dtype=values_L.dtype)
    values_N[learnt_N] = values_L
    return values_N


def _from_the_end(values_L: torch.Tensor, ends: npt.NDArray[np.int64], factor: float) -> torch.Tensor:
    """[L]: each value plus ``factor`` times the sum so far of those after it, row by row."""
    found = values_L.double().numpy()
    if factor == 1.0:
        upto = np.append(0.0, np.cumsum(found))
        lengths = np.diff(ends, prepend=0)
        return torch.from_numpy(np.repeat(upto[ends], lengths) - upto[:-1]).to(values_L.dtype)
    from scipy.signal import lfilter  # a second of imports, which most runs do without

    made, first = np.empty_like(found), 0
    for end in ends.tolist():
        made[first:end] = lfilter([1.0], [1.0, -factor], found[first:end][::-1])[::-1]
        first = end
    return torch.from_numpy(made).to(values_L.dtype)
