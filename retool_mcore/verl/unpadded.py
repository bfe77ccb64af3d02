"""verl's trainer, whose driver pads no batch to its longest response.

verl fetches the columns of all rows at once and pads them for the old log-probabilities, the
advantages and the metrics of a step. Here they come in blocks; numbers of whole responses stay
numbers of rows until they are written back.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from retool_mcore.config import RlConfig
from retool_mcore.verl.blocks import blocks
from retool_mcore.verl.engine_gap import NUMBERS, STEP
from retool_mcore.verl.gap_sums import GapSums, Mismatch
from retool_mcore.verl.learning_signal import LearningSignal, Told
from retool_mcore.verl.replay import nothing_left
from retool_mcore.verl.row_reports import RowReports
from retool_mcore.verl.update_columns import ENGINES, OLD

# The columns that a worker reads. Without a list it fetches all, among them a row's texts and what
# is said of it, and tensordict copies those one object after another for each micro-batch.
FORWARD = ("input_ids", "loss_mask", "response_mask", "routed_experts")
CRITIC = (*FORWARD, "prompts", "responses", "values", "returns")
ACTOR = (*FORWARD, "prompts", "responses", "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")


class UnpaddedTrainer(PPOTrainer):
    """A base of our trainers beside verl's own, and in front of ``PPOTrainer`` for all of them."""

    _run: RlConfig
    _steps = 0  # since the workers have started

    def _forget_step(self) -> None:
        """Before a step: nothing is known of its rows."""
        run, self._steps = self._run, self._steps + 1
        responses = run.train.prompts_per_step * run.rollout.group_size
        self._mismatch = Mismatch(responses * run.rollout.max_response_tokens)
        self._signal = LearningSignal(run.algorithm)
        self._reports = RowReports()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Store "old_log_probs" that the actor computes, and measure how far the engine is."""
        if self._run.algorithm.old_log_prob == "rollout":
            return _written(batch)  # an update reads the engine's in their place: update_columns.py
        temperature = self.config.actor_rollout_ref.rollout.temperature
        asked = {"calculate_entropy": True, "compute_loss": False, "temperature": temperature, STEP: self._steps}
        batch.extra_info = {**(batch.extra_info or {}), **asked}
        batch.fields = [*FORWARD, "rollout_log_probs"]
        done = self.actor_rollout_wg.old_log_probs(batch)
        assert len(done) == len(batch), f"{len(done)} rows of {len(batch)} have log-probabilities"
        sums = GapSums(self._mismatch)
        for block in blocks(batch, NUMBERS):
            numbers_RK = block.tokens(NUMBERS).numpy().reshape(len(block.keys), -1)
            self._mismatch.kept_by(self.actor_rollout_wg, *sums.merge(numbers_RK))
        metrics |= sums.metrics()
        return _written(batch)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        controller = self.kl_ctrl_in_reward if self.config.algorithm.use_kl_in_reward else None
        metrics |= self._signal.prepare(batch, controller)
        if not self._signal.left(batch):
            raise nothing_left(self.global_steps, f'algorithm.rejection = "{self._run.algorithm.rejection}"')
        self._signal.advantages(batch)
        return _written(batch)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch.fields = list(CRITIC)
        return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._reports.read(batch.keys, batch.partition_id or "")
        of_engines = self._run.algorithm.old_log_prob == "rollout"
        batch.fields = [ENGINES if of_engines and name == OLD else name for name in ACTOR]
        return super()._update_actor(batch, metrics)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        """verl's metrics of rows, from their tags and from what the advantages have told."""
        real = np.array([not tag.get("is_padding", False) for tag in batch.tags])
        chosen = np.flatnonzero(real if real.any() else ~real)
        metrics |= {"training/global_step": global_steps, "training/epoch": epoch}
        told = [self._signal.rows[key] for key in batch.keys]
        reports = self._reports.of(batch.keys, batch.partition_id or "")
        turns_R = np.array([report.turns for report in reports])[chosen]
        of_rows = _as_rows([batch.tags[row] for row in chosen], [told[row] for row in chosen])
        of_rows.non_tensor_batch["__num_turns__"] = turns_R.astype(np.int32)
        metrics |= compute_data_metrics(batch=of_rows, use_critic=self.use_critic)
        metrics |= self._signal.metrics()
        rows = _as_rows(batch.tags, told)
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


def _written(batch: KVBatchMeta) -> KVBatchMeta:
    """The batch after columns were stored, for a next pass that is told of none before."""
    written = copy.copy(batch)  # its constructor copies each row's tags, item by item
    written.fields, written.extra_info = list(FORWARD), {}
    return written


def _as_rows(tags: Sequence[Mapping[str, Any]], told: Sequence[Told]) -> DataProto:
    """Rows for verl's metrics: one token each.

    Of two columns only the width is read, and what hangs on tokens is counted where they are.
    """
    prompts, responses = ([tag[f"{name}_len"] for tag in tags] for name in ("prompt", "response"))
    score_R1, reward_R1 = (torch.tensor([[getattr(row, name)] for row in told]) for name in ("score", "reward"))
    size = len(told)
    columns = {
        "token_level_scores": score_R1,
        "token_level_rewards": reward_R1,
        **dict.fromkeys(("advantages", "returns", "values"), torch.zeros(size, 1)),
        "response_mask": torch.tensor([[row.learnt > 0] for row in told]),
        "prompts": torch.empty(1).expand(size, max(prompts)),
        "responses": torch.empty(1).expand(size, max(responses)),
        "prompt_length": torch.tensor(prompts, dtype=torch.float32),
        "response_length": torch.tensor(responses, dtype=torch.float32),
    }
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return DataProto(batch=TensorDict(columns, batch_size=size), meta_info={"global_token_num": lengths})


def _spread(name: str, values: Any) -> dict[str, float]:
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}
