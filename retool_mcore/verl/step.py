"""One RL step, from prompts to new weights in the rollout engines.

Read this file from the top. verl's ``fit`` drives the run. For each step it calls, in this order:

    on_step_begin       reset the per-step records
    step                sample trajectories, then train on them            (this file)
    _save_checkpoint    if a checkpoint is due                             (trainer.py)
    on_step_end         send the new weights to the engines                (this file)
    _validate           if a validation is due                             (trainer.py)
    _compute_metrics    write one row of metrics.jsonl                     (trainer.py)

All three modes run this code. They differ in their verl base classes, which decide when engines
sleep and how weights reach them, and in the few lines below that name a mode:

    sync              submits the next step's prompts as soon as the engines have the new weights
    partial_rollout   keeps more prompts in flight than a step needs; unfinished ones continue
    async             runs the engines on separate GPUs; a step samples and trains several times

``rows`` is a ``KVBatchMeta``: the keys and tags of a batch of trajectories. Their tensors are in
TransferQueue, one column per field.
"""

import copy
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from retool_mcore.verl.advantages import move_rewards_into_loss
from retool_mcore.verl.assign import (
    assign_to_updates,
    groups_of_rows,
    order_for_ranks,
    real_keys,
    rows_of_update,
    sort_rows,
)
from retool_mcore.verl.engines import SeparateEngineManager
from retool_mcore.verl.keys.rollout import TRAINER_MODES
from retool_mcore.verl.measure import mismatch_after_update, mismatch_metrics
from retool_mcore.verl.replay import no_learnable_response, require_learnable
from retool_mcore.verl.trainer import RlRun
from retool_mcore.verl.update_worker import KEEP_LOG_PROBS, LOSS_TOKENS, REAL_ROWS

# The columns that workers read. Without a list, a worker fetches every column, including texts and
# records, and tensordict copies those object by object for each micro-batch.
FORWARD_COLUMNS = ("input_ids", "loss_mask", "response_mask", "routed_experts")
CRITIC_COLUMNS = (*FORWARD_COLUMNS, "prompts", "responses", "values", "returns")
ACTOR_COLUMNS = (
    *FORWARD_COLUMNS,
    "prompts",
    "responses",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_is_weights",
)

PER_TOKEN_ESTIMATORS = ("ppo", "reinforce_plus_plus")  # estimators that use per-token rewards
# Summed over the batches of a step. verl's aggregator would average these metrics.
SUMMED = ("rollout/dropped", "rollout/refilled_prompts", f"actor/{LOSS_TOKENS}")


class RlStep(RlRun):
    """The step that the trainers of all modes share; see the module docstring."""

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Sample trajectories and train on them.

        Returns the rows that the step trained on, padding rows included. Adds to ``metrics``.
        """
        self.prepare_step()  # submits the step's prompts unless they are already in flight

        trained_rows, aggregator, batches = KVBatchMeta(partition_id="train", keys=[], tags=[]), MetricsAggregator(), []
        for number in range(self.parameter_sync_step):  # one batch; several in mode "async"
            self.local_trigger_step = number
            batch_metrics: dict[str, Any] = {}
            rows = self.learn(self.sample(batch_metrics), batch_metrics)
            batches.append(batch_metrics)
            aggregator.add_step_metrics(batch_metrics, sample_count=len(real_keys(rows)))
            trained_rows.keys.extend(rows.keys)
            trained_rows.tags.extend(rows.tags)

        metrics |= aggregator.get_aggregated_metrics()
        metrics |= {name: sum(batch[name] for batch in batches) for name in SUMMED if name in batches[-1]}
        return trained_rows

    def sample(self, metrics: dict[str, Any]) -> KVBatchMeta:
        """Wait for one batch of finished groups and take it out of the replay buffer."""
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        with self.timed("gen"):
            self.on_sample_begin()
            with self.interruptible():  # while it waits, the buffer calls while_sampling
                rows, counts = self.replay_buffer.sample(self.global_steps, "train", prompts)
            metrics |= counts
            self.collect_engine_load()
            self.detach_dead_engines()
            with self.timed("engine_sleep"):
                self.on_sample_end()  # colocated engines free their GPU memory for training
        return rows

    def learn(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Update actor and critic on one batch.

        verl computes advantages, losses and corrections (core_algos.py, rollout_corr_helper.py).
        """
        run = self._run.algorithm

        # Assign whole groups to optimizer steps, and balance the tokens of data-parallel ranks.
        rows = self.assign(rows, metrics)
        if run.masks_responses:
            metrics["loss/masked_fraction"] = require_learnable(
                rows, self.global_steps, f"algorithm.mask = {json.dumps(run.mask)}"
            )

        # Compute the actor's and the reference model's log-probs of the sampled tokens, before the
        # update, and the critic's values.
        with self.timed("old_log_prob"):
            rows = self._compute_old_log_prob(with_columns(rows, FORWARD_COLUMNS), metrics)
            if run.old_log_prob == "actor":
                metrics |= mismatch_metrics(rows)
        if self.use_reference_policy:
            with self.timed("ref"):
                rows = self._compute_ref_log_prob(with_columns(rows, FORWARD_COLUMNS), metrics)
        if self.use_critic:
            with self.timed("values"):
                rows = self._compute_values(with_columns(rows, FORWARD_COLUMNS), metrics)

        # Apply KL penalty, importance weights and rejection; then compute advantages.
        with self.timed("adv"):
            rows = self.compute_advantages(rows, metrics)

        # Take the gradient steps. No weight has changed yet, so in mode "sync" a run that got a
        # stop request stops here and repeats the step later.
        self.stop_if_requested()
        if self.use_critic:
            with self.timed("update_critic"):
                rows = self.update_critic(rows, metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with self.timed("update_actor"):
                rows = self.update_actor(rows, metrics)
        return rows

    def assign(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Reorder the rows so that verl's dispatch and mini-batch split yield our optimizer steps.

        Each optimizer step trains on ``train.mini_batch_prompts`` prompts. verl's padding rows,
        whose loss mask is 0, replace dropped trajectories.
        """
        run = self._run
        sort_rows(rows)
        prompts = run.train.mini_batch_prompts * self.updates_per_batch
        rows = upsample_batch_to_divisible_size(rows, prompts * run.rollout.group_size, self.tokenizer.eos_token_id)
        lengths = [tag["seq_len"] for tag in rows.tags]
        seed = (run.run.seed, self.global_steps, self.local_trigger_step)
        assigned = assign_to_updates(groups_of_rows(rows), self.updates_per_batch, seed)
        order = order_for_ranks(assigned, lengths, run.dp)
        rows.reorder(order)
        by_rank = np.array_split(np.asarray(order), run.dp)
        metrics |= log_seqlen_unbalance(lengths, [part.tolist() for part in by_rank], prefix="global_seqlen")
        return rows

    def compute_advantages(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Store the columns "advantages" and "returns".

        Depending on the settings, also store importance weights and a mask without rejected tokens.
        Raises RolloutError if rejection leaves no token in the loss.
        """
        run = self._run.algorithm
        if run.name in PER_TOKEN_ESTIMATORS:
            move_rewards_into_loss(rows)
        if run.rejection == "off" or run.old_log_prob == "rollout":  # with "rollout" the loss rejects
            return self._compute_advantage(rows, metrics)
        settings = f'algorithm.rejection = "{run.rejection}"'
        try:
            rows = self._compute_advantage(rows, metrics)
        except ValueError as error:  # verl's masked_whiten raises it if the mask is empty
            if "mask" in str(error):
                raise no_learnable_response(self.global_steps, settings) from error
            raise
        require_learnable(rows, self.global_steps, settings)
        return rows

    def update_critic(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        rows = with_columns(rows, CRITIC_COLUMNS)
        rows.extra_info = {REAL_ROWS: self.real_rows_of_updates(rows)}
        return self._update_critic(rows, metrics)

    def update_actor(self, rows: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Run the optimizer steps of the actor.

        With ``algorithm.old_log_prob = "rollout"`` the actor computes log-probs only in the forward
        passes of these steps. This method stores them for the trajectory file and the mismatch
        metrics.
        """
        rows, uses_engine_log_probs = with_columns(rows, ACTOR_COLUMNS), self._run.algorithm.old_log_prob == "rollout"
        rows.extra_info = {REAL_ROWS: self.real_rows_of_updates(rows), KEEP_LOG_PROBS: uses_engine_log_probs}
        rows = self._update_actor(rows, metrics)
        if uses_engine_log_probs:
            self.actor_rollout_wg.log_probs_of_update(with_columns(rows, ("response_mask",)))
            if self.local_trigger_step == 0:  # in later batches, the actor's weights differ
                first = self.rows_of_update(rows, 0)
                metrics |= mismatch_after_update(first, self.config.algorithm.rollout_correction)
        return rows

    def rows_of_update(self, rows: KVBatchMeta, update: int) -> KVBatchMeta:
        chosen = rows_of_update(len(rows.keys), update, self.updates_per_batch, self._run.dp)
        keys, tags = ([column[row] for row in chosen] for column in (rows.keys, rows.tags))
        return KVBatchMeta(partition_id=rows.partition_id, keys=keys, tags=tags)

    def real_rows_of_updates(self, rows: KVBatchMeta) -> tuple[int, ...]:
        """Number of trajectories in each update, without padding: the divisor of response means."""
        updates = range(self.updates_per_batch)
        return tuple(len(real_keys(self.rows_of_update(rows, update))) for update in updates)

    def on_step_end(self) -> None:
        """Restart dead engines, send the new weights to all engines and verify what arrived."""
        self.save_if_requested()
        self.detach_dead_engines()
        restarted = self.restart_lost_engines()
        self.sleep_engines(restarted)
        super().on_step_end()  # verl's weight sync, under the timer "update_weights"
        self.admit_engines(restarted)
        self.compare_weights()
        self.engine_version = self.global_steps
        last = self.global_steps == self.total_training_steps
        if self.trainer_mode == "sync" and not last and not self.validates_now:
            self.submit_next_prompts()  # the engines sample while the driver writes metrics

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Time the block, in seconds, with verl's timer ``name`` of this step."""
        return marked_timer(name, self.timing_raw)


def with_columns(rows: KVBatchMeta, columns: Sequence[str]) -> KVBatchMeta:
    """Copy ``rows`` for one call of a worker: only ``columns``, without the last call's options."""
    selected = copy.copy(rows)  # shallow: the constructor would copy the tags of each row
    selected.fields, selected.extra_info = list(columns), {}
    return selected


@register_trainer(TRAINER_MODES["sync"])
class ReToolTrainer(RlStep, PPOTrainerSync):
    """Each step waits for all of its trajectories; engines sleep while the actor trains."""

    verl_mode = "sync"


@register_trainer(TRAINER_MODES["partial_rollout"])
class ReToolPartialRolloutTrainer(RlStep, PPOTrainerColocateAsync):
    """Keeps more prompts in flight than a step needs; unfinished ones continue in the next step."""

    verl_mode = "colocate_async"


@register_trainer(TRAINER_MODES["async"])
class ReToolAsyncTrainer(SeparateEngineManager, RlStep, PPOTrainerSeparateAsync):
    """Engines on separate GPUs sample with the last step's weights while the actor trains."""

    verl_mode = "separate_async"

    def __init__(self, config: DictConfig) -> None:
        # verl 0.9.1 passes flush=True to logger.info, which raises TypeError if INFO is enabled.
        # Remove this when _setup in trainer_separate_async.py no longer does so.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super().__init__(config)
        self.updates_per_batch = 1

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Compute log-probs with verl's saved copy of the weights at the start of the step.

        With one update per step, the current weights are those weights, so no copy is needed.
        """
        if self._run.train.updates_per_step == 1:
            return PPOTrainer._compute_old_log_prob(self, batch, metrics)
        return super()._compute_old_log_prob(batch, metrics)
