"""verl's trainer, whose driver pads no batch to its longest response.

verl fetches the columns of all rows at once and pads them for the old log-probabilities, the
advantages and the metrics of a step. Here they come in blocks; numbers of whole responses stay
numbers of rows until they are written back. What weighs or rejects tokens, a critic, and advantages
that differ within a response are verl's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from retool_mcore.config import RlConfig
from retool_mcore.verl.blocks import blocks, values_of_rows
from retool_mcore.verl.gap_sums import GapSums, Mismatch

OF_ROWS = ("grpo", "rloo")  # algorithm.name: a response has one advantage, by the rewards alone


@dataclass(frozen=True)
class Told:
    """What the metrics need of a row: its reward, its advantage, and its tokens in the loss."""

    score: float
    advantage: float
    learnt: int


class UnpaddedTrainer(PPOTrainer):
    """A base of our trainers beside verl's own, and in front of ``PPOTrainer`` for all of them."""

    _run: RlConfig

    def _forget_step(self) -> None:
        """Before a step: nothing is known of its rows."""
        run = self._run
        responses = run.train.prompts_per_step * run.rollout.group_size
        self._mismatch = Mismatch(responses * run.rollout.max_response_tokens)
        self._of_pass: dict[str, float] = {}
        self._told: dict[str, Told] = {}

    @property
    def _changes_tokens(self) -> bool:
        """Whether single tokens are weighed or rejected by engine and actor."""
        a = self._run.algorithm
        return a.importance_sampling != "off" or a.rejection != "off"

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Store "old_log_probs"; where the actor computes them, measure how far the engine is."""
        if self._run.algorithm.old_log_prob == "rollout":
            for block in blocks(batch, "rollout_log_probs"):
                block.put(old_log_probs=block.tokens("rollout_log_probs"))
            return _written(batch)
        temperature = self.config.actor_rollout_ref.rollout.temperature
        asked = {"calculate_entropy": True, "compute_loss": False, "temperature": temperature}
        batch.extra_info = {**(batch.extra_info or {}), **asked}
        done = self.actor_rollout_wg.compute_log_prob(batch)
        assert len(done) == len(batch), f"{len(done)} rows of {len(batch)} have log-probabilities"
        sums = GapSums(self._mismatch)
        for block in blocks(batch, "response_mask", "log_probs", "entropy", "rollout_log_probs"):
            actor_N = block.responses("log_probs")
            block.put(old_log_probs=actor_N)
            entropy_N = block.responses("entropy")
            sums.add(actor_N, block.tokens("rollout_log_probs"), block.tokens("response_mask"), block.starts, entropy_N)
        self._of_pass = sums.metrics()
        metrics |= self._of_pass
        return _written(batch)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        a = self._run.algorithm
        if a.name not in OF_ROWS or self._changes_tokens or (a.kl_coef and a.kl_in == "reward"):
            return super()._compute_advantage(batch, metrics)
        scores = [block.row_sums("rm_scores") for block in blocks(batch, "rm_scores")]
        score_R = torch.from_numpy(np.concatenate(scores))
        advantage_R = self._advantages_of_rows(batch, score_R)
        row = 0
        for block in blocks(batch, "response_mask"):
            rows = slice(row, row := row + len(block.keys))
            mask_N = block.tokens("response_mask")
            block.put(advantages=advantage_R[rows].repeat_interleave(block.lengths) * mask_N)
            learnt = block.row_sums("response_mask")
            told = zip(score_R[rows].tolist(), advantage_R[rows].tolist(), learnt.tolist(), strict=True)
            self._told |= {key: Told(*each) for key, each in zip(block.keys, told, strict=True)}
        return _written(batch)

    def _advantages_of_rows(self, batch: KVBatchMeta, score_R: torch.Tensor) -> torch.Tensor:
        """verl's, of responses that are one token long each."""
        score_R1 = score_R[:, None]
        columns = {"token_level_rewards": score_R1, "response_mask": torch.ones_like(score_R1)}
        rows = DataProto(
            batch=TensorDict(columns, batch_size=len(score_R)),
            non_tensor_batch={"uid": np.array(values_of_rows(batch, "uid"), dtype=object)},
        )
        algorithm = self.config.algorithm
        rows = compute_advantage_for_multi_trajectories(
            rows,
            batch_keys=batch.keys,
            adv_estimator=algorithm.adv_estimator,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        return rows.batch["advantages"][:, 0]

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        """verl's metrics of rows, from their tags and from what the advantages have told."""
        if not all(key in self._told for key in batch.keys):
            return super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        real = np.array([not tag.get("is_padding", False) for tag in batch.tags])
        chosen = np.flatnonzero(real if real.any() else ~real)
        metrics |= {"training/global_step": global_steps, "training/epoch": epoch}
        rows = _as_rows(batch, [self._told[key] for key in batch.keys])
        turns_R = np.array([int(turns) for turns in values_of_rows(batch, "num_turns")])[chosen]
        of_rows = rows.select_idxs(chosen)
        of_rows.non_tensor_batch["__num_turns__"] = turns_R.astype(np.int32)
        metrics |= compute_data_metrics(batch=of_rows, use_critic=self.use_critic)
        metrics |= _advantages_of_tokens([self._told[batch.keys[row]] for row in chosen])
        metrics |= compute_timing_metrics(batch=rows, timing_raw=timing_raw)
        gpus = self._get_n_gpus_for_throughput()
        metrics |= compute_throughout_metrics(batch=rows, timing_raw=timing_raw, n_gpus=gpus)
        metrics |= _spread("training/num_turns", turns_R)
        first, last = (
            np.array([batch.tags[row][f"{name}_global_steps"] for row in np.flatnonzero(real)], dtype=int)
            for name in ("min", "max")
        )
        metrics |= _spread("training/off_policy/trajectory_spans", last - first + 1)
        metrics |= _spread("training/off_policy/trajectory_staleness", global_steps - 1 - last)
        metrics |= _spread("training/off_policy/trajectory_staleness_worst", global_steps - 1 - first)
        return None


def _written(batch: KVBatchMeta) -> KVBatchMeta:
    """The batch after columns were stored: workers fetch all, and are told of no earlier pass."""
    return KVBatchMeta(partition_id=batch.partition_id, keys=batch.keys, tags=batch.tags)


def _as_rows(batch: KVBatchMeta, told: list[Told]) -> DataProto:
    """The batch for verl's metrics: one token a row. Of two columns only the width is read."""
    prompts, responses = ([tag[f"{name}_len"] for tag in batch.tags] for name in ("prompt", "response"))
    score_R1, advantage_R1 = (torch.tensor([[getattr(row, name)] for row in told]) for name in ("score", "advantage"))
    size = len(told)
    columns = {
        "token_level_scores": score_R1,
        "token_level_rewards": score_R1,
        "advantages": advantage_R1,
        "returns": advantage_R1,
        "response_mask": torch.tensor([[row.learnt > 0] for row in told]),
        "prompts": torch.empty(1).expand(size, max(prompts)),
        "responses": torch.empty(1).expand(size, max(responses)),
        "prompt_length": torch.tensor(prompts, dtype=torch.float32),
        "response_length": torch.tensor(responses, dtype=torch.float32),
    }
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return DataProto(batch=TensorDict(columns, batch_size=size), meta_info={"global_token_num": lengths})


def _advantages_of_tokens(told: list[Told]) -> dict[str, float]:
    """The means over tokens in the loss; of rows, verl has taken minima and maxima."""
    tokens = sum(row.learnt for row in told)
    mean = sum(row.advantage * row.learnt for row in told) / tokens if tokens else float("nan")
    return {"critic/advantages/mean": mean, "critic/returns/mean": mean}


def _spread(name: str, values: Any) -> dict[str, float]:
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}
