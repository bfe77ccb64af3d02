"""Hand-made responses, as verl's loss and its trainer's advantages get them, for tests of
[algorithm].

Names end in their shape: B responses of up to T tokens, padded. The second response calls the
interpreter: its result's tokens are masked.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys import tree as keys

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"
KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
LENGTHS_B = [3, 6, 1, 4]
MASK_BT = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
TEXT_BT = torch.tensor([[1] * length + [0] * (6 - length) for length in LENGTHS_B])
# Log-probabilities under the old weights; what the trained weights have added to them since; and
# what the sampling engine had reported.
OLD_BT = TEXT_BT * torch.tensor(
    [
        [-1.0, -0.5, -2.0, 0, 0, 0],
        [-0.3, -1.2, -4.0, -6.0, -0.7, -2.5],
        [-1.1, 0, 0, 0, 0, 0],
        [-0.2, -0.9, -3.0, -1.4, 0, 0],
    ]
)
MOVED_BT = TEXT_BT * torch.tensor(
    [
        [0.1, -0.4, 0.6, 0, 0, 0],
        [0.05, 0.4, 3.0, -3.0, -0.1, 0.2],
        [-0.9, 0, 0, 0, 0, 0],
        [0.02, -0.03, 0.01, 0.05, 0, 0],
    ]
)
ENGINE_BT = OLD_BT - TEXT_BT * torch.tensor(
    [
        [0.02, -0.01, 0.03, 0, 0, 0],
        [0.9, -1.1, 5.0, 5.0, 0.1, 0.0],
        [-0.8, 0, 0, 0, 0, 0],
        [0.001, -0.002, 0.001, 0.0, 0, 0],
    ]
)
REWARD_B = torch.tensor([1.0, -1.0, 0.5, 2.0])
ADVANTAGE_B1 = torch.tensor([[0.8], [-1.5], [-0.6], [1.1]])
Ranks = Sequence[Sequence[Sequence[int]]]  # the rows of each micro-batch of each data-parallel rank


defaults = cache(keys.ppo_defaults)  # composed once


def tree(*settings: str) -> Any:
    """verl's resolved tree of the tiny run with ``settings``, as verl's trainer gets it."""
    from omegaconf import OmegaConf

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(keys, "ppo_defaults", lambda: copy.deepcopy(defaults()))
        made = keys.ppo_tree(load_config(RlConfig, RL, settings), get_platform("cpu"))
    return OmegaConf.create(OmegaConf.to_container(made, resolve=True))


def actor_config(*settings: str) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(tree(*settings).actor_rollout_ref.actor)


def jagged(values_BT: torch.Tensor, rows: Sequence[int] = range(4)) -> torch.Tensor:
    return torch.nested.as_nested_tensor([values_BT[row, : LENGTHS_B[row]] for row in rows], layout=torch.jagged)


def learn(*settings: str, **columns_BT: torch.Tensor) -> tuple[float, torch.Tensor]:
    """verl's loss of one update and its gradient [B, T] by the new log-probabilities.

    In two micro-batches of unequal length, as a rank packs them: an update's loss is their sum.
    """
    return update([[[1], [0, 2, 3]]], *settings, **columns_BT)[:2]


def update(
    ranks: Ranks, *settings: str, tokens: int = int(MASK_BT.sum()), **columns_BT: torch.Tensor
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient [B, T] and metrics of one update of ``tokens`` with the workers' loss.

    Adds up micro-batches and ranks as verl's engine and worker do.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.utils.losses import ppo_loss

    from retool_mcore.verl.update_worker import divide_by_tokens, loss_of_micro_batch

    new_BT, total, reports = (OLD_BT + MOVED_BT).requires_grad_(), torch.zeros(()), []
    loss_function = loss_of_micro_batch(partial(ppo_loss, actor_config(*settings)))
    columns = {"old_log_probs": OLD_BT, "advantages": ADVANTAGE_B1.expand(4, 6), "response_mask": MASK_BT}
    for micro_batches in ranks:
        report: dict[str, Any] = {}
        for rows in micro_batches:
            data = micro_batch(rows, len(ranks), **columns | columns_BT)
            tu.assign_non_tensor(data, batch_num_tokens=tokens)
            loss, metrics = loss_function(data=data, model_output={"log_probs": model_values(new_BT, rows)})
            total = total + loss / len(ranks)  # gradients are averaged over ranks
            append_to_dict(report, metrics)
        reports.append(report)
    names = [name for name, value in reports[0].items() if isinstance(value, Metric)]
    means = {name: [Metric.aggregate_dp([report[name] for report in reports])] for name in names}
    divide_by_tokens(means)
    (gradient_BT,) = torch.autograd.grad(total, new_BT)
    return float(total), gradient_BT, {name: value for name, (value,) in means.items()}


def micro_batch(rows: Sequence[int], ranks: int = 1, **columns_BT: torch.Tensor) -> Any:
    """What verl's engine hands to a loss of ``rows`` of the update, after prompts of one token."""
    from verl.utils import tensordict_utils as tu

    prompts = torch.nested.as_nested_tensor([torch.tensor([7])] * len(rows), layout=torch.jagged)
    columns = {"responses": torch.full((4, 6), 8), **columns_BT}
    return tu.get_tensordict(
        tensor_dict={"prompts": prompts} | {name: jagged(column, rows) for name, column in columns.items()},
        non_tensor_dict={"dp_size": ranks, "batch_num_tokens": int(MASK_BT.sum()), "global_batch_size": 4},
    )


def model_values(new_BT: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The model's values [all tokens] of ``rows``, each after a prompt of one token.

    The value at a position is for the token after it, the last one for none.
    """
    return torch.cat([torch.cat([new_BT[row, : LENGTHS_B[row]], torch.tensor([-99.0])]) for row in rows])


def by_formula(objective: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """The negative of a paper's objective at the new log-probabilities [B, T], and its gradient."""
    new_BT = (OLD_BT + MOVED_BT).requires_grad_()
    loss = -objective(new_BT)
    (gradient_BT,) = torch.autograd.grad(loss, new_BT)
    return float(loss), gradient_BT


def scores() -> torch.Tensor:
    """[B, T] the rewards, each on the last token of its response."""
    scores_BT = torch.zeros(4, 6)
    for row, length in enumerate(LENGTHS_B):
        scores_BT[row, length - 1] = REWARD_B[row]
    return scores_BT


def trained_on(patching: pytest.MonkeyPatch, *settings: str, **columns_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns [B, T] that a step makes for the update: advantages, mask, weights."""
    columns = {"response_mask": MASK_BT, "rm_scores": scores(), "old_log_probs": OLD_BT}
    queue = Queue(patching, **columns | {"rollout_log_probs": ENGINE_BT, **columns_BT})
    learning_trainer(*settings).compute_advantages(batch(), {})
    names = {name for row in queue.rows.values() for name in row}
    return {name: pad_sequence([queue.rows[key][name] for key in KEYS], batch_first=True) for name in names}


def learning_trainer(*settings: str) -> Any:
    """Our trainer of mode "sync" in step 3, without verl's set-up, which starts workers."""
    from verl.trainer.ppo import core_algos

    from retool_mcore.verl.step import ReToolTrainer

    settings = ("rollout.group_size=2", *settings)
    trainer: Any = object.__new__(ReToolTrainer)
    trainer._run, trainer.config = load_config(RlConfig, RL, settings), tree(*settings)
    trainer.global_steps, trainer.local_trigger_step, trainer.timing_raw = 3, 0, {}
    trainer.updates_per_batch, trainer.use_critic = trainer._run.train.updates_per_step, False
    trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(trainer.config.algorithm.kl_ctrl)
    return trainer


class Queue:
    """verl's transfer queue with the columns [B, T] of four responses of two prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **columns_BT: torch.Tensor) -> None:
        from verl.trainer.ppo.v1 import trainer_base

        from retool_mcore.verl import advantages, measure, replay

        self.rows: dict[str, dict[str, torch.Tensor]] = {
            key: {name: column[row, : LENGTHS_B[row]] for name, column in columns_BT.items()}
            for row, key in enumerate(KEYS)
        }
        for module in (trainer_base, advantages, measure, replay):
            monkeypatch.setattr(module, "tq", self)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        """Jagged columns; like verl's queue it leaves out what no row has."""
        from verl.utils import tensordict_utils as tu

        columns: dict[str, torch.Tensor] = {}
        for name in select_fields:
            if name in self.rows[keys[0]]:
                rows = [self.rows[key][name] for key in keys]
                columns[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        data = tu.get_tensordict(columns, {})
        if "uid" in select_fields:
            tu.assign_non_tensor_stack(data, "uid", [key[0] for key in keys])
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        for name in fields.keys():  # noqa: SIM118
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value
        return batch(keys)


def batch(keys: Sequence[str] = KEYS) -> Any:
    from transfer_queue import KVBatchMeta

    return KVBatchMeta(partition_id="train", keys=list(keys), tags=[{} for _ in keys], extra_info={})
