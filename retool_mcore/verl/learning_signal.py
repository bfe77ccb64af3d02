"""What a step's tokens are learnt with: rewards, weights, rejection and advantages of its rows.

The rules are verl's. Its functions take all rows at once, padded to the longest; here rows come in
blocks, and what has one number for a response is computed of such numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import kl_penalty

from retool_mcore.config import Algorithm
from retool_mcore.verl.blocks import Block, blocks, put_values
from retool_mcore.verl.correction import Correction
from retool_mcore.verl.measure import uid_of
from retool_mcore.verl.row_reports import ReadAhead
from retool_mcore.verl.token_advantages import Whitening, discounted, generalized
from retool_mcore.verl.update_columns import MASK

_EPSILON = 1e-6  # verl's, beside a group's standard deviation


@dataclass(frozen=True)
class Told:
    """What is known of a row: its score, its reward, and its tokens in the loss.

    The reward is the score without what a divergence takes off.
    """

    score: float
    reward: float
    learnt: int


class LearningSignal:
    """Of one step, whose rows may come in several batches."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = a = algorithm
        correction = Correction(a)
        # With the engine's as the old ones the loss weighs and rejects, by its own forward pass.
        self._corrects = a.old_log_prob == "actor" and (correction.weighs or correction.rejects)
        self._reads_all = self._corrects or (a.kl_in == "reward" and a.kl_coef > 0)
        self.rows: dict[str, Told] = {}
        self._ahead = ReadAhead(_as_sampled)
        self._sums = {name: _Sums() for name in ("advantages", "returns", "values", "errors")}

    def read_ahead(self, keys: Sequence[str], partition_id: str) -> None:
        """Begin to read rows that are whole, while others are sampled; ``prepare`` has them then.

        Not where it reads all of them in any case, for what is computed of them after that.
        """
        if not self._reads_all:
            self._ahead.read(keys, partition_id)

    def prepare(self, batch: KVBatchMeta, controller: Any = None) -> dict[str, float]:
        """Store weights, the mask after rejection, and rewards of tokens; returns metrics of these.

        ``controller``: verl's, of the divergence that is taken off the rewards.
        """
        a = self._algorithm
        correction, corrects = Correction(a), self._corrects
        old = "old_log_probs" if a.old_log_prob == "actor" else "rollout_log_probs"
        names = [MASK, "rm_scores", *([old] if corrects or controller else [])]
        names += [*(["rollout_log_probs"] if corrects else []), *(["ref_log_prob"] if controller else [])]
        divergence = list[npt.NDArray[Any]]()
        known = self._ahead.known()
        self.rows |= {key: known[key] for key in batch.keys if key in known}
        for block in blocks(batch, *names, but=known):
            mask_N, scores = block.tokens(MASK), block.row_sums("rm_scores")
            stored, rewards = dict[str, torch.Tensor](), scores
            if controller:
                kl_N = kl_penalty(block.tokens(old), block.tokens("ref_log_prob"), a.kl_type) * mask_N
                stored["token_level_rewards"] = reward_N = block.tokens("rm_scores") - controller.value * kl_N
                rewards = block.sums(reward_N)
                learnt = block.sums(mask_N)
                divergence.append(block.sums(kl_N)[learnt > 0] / learnt[learnt > 0])
            if corrects:
                gap_N = block.tokens("old_log_probs") - block.tokens("rollout_log_probs")
                stored |= correction.of_rows(gap_N, mask_N, block.starts)
            if stored:
                block.put(**stored)
            self.rows |= _told(block, scores, rewards, block.sums(stored.get(MASK, mask_N)))
        return correction.metrics() | (_penalty(controller, np.concatenate(divergence)) if controller else {})

    def left(self, batch: KVBatchMeta) -> bool:
        """Whether any token of the batch is in the loss."""
        return any(self.rows[key].learnt for key in batch.keys)

    def advantages(self, batch: KVBatchMeta) -> None:
        """Store "advantages", and "returns" where they are not the same.

        Where all tokens of a response have one advantage, that of the response: update_columns.py.
        """
        if self._algorithm.name in ("ppo", "reinforce_plus_plus"):
            self._of_tokens(batch)
        else:
            self._of_rows(batch)

    def _of_rows(self, batch: KVBatchMeta) -> None:
        rows = [self.rows[key] for key in batch.keys]
        reward_R = np.array([row.reward for row in rows])
        learnt_R = np.array([row.learnt for row in rows])
        value_R = torch.from_numpy(self._compared(batch.keys, reward_R, learnt_R)).float()
        put_values(batch, advantages=value_R)
        some = torch.from_numpy(learnt_R > 0)
        for name in ("advantages", "returns"):
            self._sums[name].add(value_R[some], torch.from_numpy(learnt_R)[some])

    def _compared(
        self, keys: Sequence[str], reward_R: npt.NDArray[Any], learnt_R: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """[R]: each response's reward beside those of its prompt."""
        name = self._algorithm.name
        group_R = np.unique([uid_of(key) for key in keys], return_inverse=True)[1]
        size_R = np.bincount(group_R)[group_R]
        weight_R = learnt_R if name == "opo" else np.ones(len(keys))
        whole_R = np.bincount(group_R, weight_R)[group_R]
        mean_R = np.bincount(group_R, weight_R * reward_R)[group_R] / np.maximum(whole_R, 1)
        beyond_R = reward_R - np.where(size_R > 1, mean_R, 0.0)
        several_R = np.maximum(size_R - 1, 1)
        if name == "rloo":
            return np.where(size_R > 1, beyond_R * size_R / several_R, beyond_R)
        if name == "grpo" and self._algorithm.normalize_by_std:
            spread_R = np.sqrt(np.bincount(group_R, beyond_R**2)[group_R] / several_R)
            return beyond_R / (np.where(size_R > 1, spread_R, 1.0) + _EPSILON)
        if name == "reinforce_plus_plus_baseline":
            whiten, values_R = Whitening(), torch.from_numpy(beyond_R)
            whiten.add(values_R, torch.from_numpy(learnt_R))
            return whiten(values_R).numpy()
        return beyond_R

    def _of_tokens(self, batch: KVBatchMeta) -> None:
        a, whiten = self._algorithm, Whitening()
        critic = ["values"] if a.name == "ppo" else []
        rewards = "token_level_rewards" if a.kl_in == "reward" and a.kl_coef else "rm_scores"
        for block in blocks(batch, MASK, rewards, *critic):
            learnt_N, reward_N = block.tokens(MASK).bool(), block.tokens(rewards)
            if critic:
                value_N = block.tokens("values")
                found_N = generalized(reward_N, value_N, block, learnt_N, gamma=a.gamma, lam=a.lam)
                return_N = found_N + value_N
                self._sums["values"].add(value_N[learnt_N])
                self._sums["errors"].add(found_N[learnt_N])
            else:
                return_N = found_N = discounted(reward_N, block, learnt_N, a.gamma)
            whiten.add(found_N[learnt_N])
            self._sums["returns"].add(return_N[learnt_N])
            block.put(advantages=found_N, returns=return_N)
        for block in blocks(batch, MASK, "advantages"):
            learnt_N = block.tokens(MASK).bool()
            normal_N = torch.where(learnt_N, whiten(block.tokens("advantages")), torch.zeros(()))
            self._sums["advantages"].add(normal_N[learnt_N])
            block.put(advantages=normal_N)

    def metrics(self) -> dict[str, float]:
        """verl's critic/* of all tokens in the loss."""
        told: dict[str, float] = {}
        for name in ("advantages", "returns", *(["values"] if self._sums["values"].tokens else [])):
            told |= {f"critic/{name}/{each}": value for each, value in self._sums[name].metrics().items()}
        if self._sums["values"].tokens:
            errors, returns = self._sums["errors"].variance, self._sums["returns"].variance
            told["critic/vf_explained_var"] = 1.0 - errors / (returns + 1e-5)
        return told


def _as_sampled(keys: list[str], partition_id: str) -> dict[str, Told]:
    """Of rows that nothing has changed yet."""
    found: dict[str, Told] = {}
    for block in blocks(KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{}] * len(keys)), MASK, "rm_scores"):
        scores = block.row_sums("rm_scores")
        found |= _told(block, scores, scores, block.row_sums(MASK))
    return found


def _told(block: Block, *numbers_R: npt.NDArray[Any]) -> dict[str, Told]:
    rows = zip(*(numbers.tolist() for numbers in numbers_R), strict=True)
    return {key: Told(*row) for key, row in zip(block.keys, rows, strict=True)}


class _Sums:
    """Mean, variance, minimum and maximum of what comes block by block."""

    def __init__(self) -> None:
        self.tokens, self._sum, self._squares = 0, 0.0, 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, values: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """``tokens``: how many each value stands for; 1 if left out."""
        if not len(values):
            return
        wide = values.double()
        counts = torch.ones((), dtype=torch.float64) if tokens is None else tokens.double()
        self.tokens += len(values) if tokens is None else int(tokens.sum())
        self._sum += float((wide * counts).sum())
        self._squares += float((wide.square() * counts).sum())
        self._least, self._most = min(self._least, float(values.min())), max(self._most, float(values.max()))

    @property
    def variance(self) -> float:
        mean = self._sum / max(self.tokens, 1)
        return max(self._squares - mean * self._sum, 0.0) / max(self.tokens - 1, 1)

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return dict.fromkeys(("mean", "max", "min"), math.nan)
        return {"mean": self._sum / self.tokens, "max": self._most, "min": self._least}


def _penalty(controller: Any, divergence_R: npt.NDArray[Any]) -> dict[str, float]:
    """verl's metrics of the divergence, over responses with a token in the loss."""
    kl, weight = float(divergence_R.mean()) if len(divergence_R) else 0.0, controller.value
    controller.update(current_kl=kl, n_steps=len(divergence_R))
    return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": weight}
