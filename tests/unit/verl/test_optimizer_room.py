"""The room held for Adam's states is as large as they are. On GPUs: numerics/test_gpu_parity.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.planner.memory import STATE_BYTES
from retool_mcore.verl.update_worker import bytes_of_states, reserve_adam_memory

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
PLAIN = SimpleNamespace(optimizer_cpu_offload=False, use_precision_aware_optimizer=False)


def part(count: int, config: Any = PLAIN) -> SimpleNamespace:
    parameters = [torch.nn.Parameter(torch.ones(count)), torch.nn.Parameter(torch.ones(3, 5))]
    return SimpleNamespace(optimizer=torch.optim.AdamW(parameters), config=config)


def chained(*parts: SimpleNamespace) -> SimpleNamespace:
    groups = [group for each in parts for group in each.optimizer.param_groups]
    return SimpleNamespace(chained_optimizers=list(parts), param_groups=groups)


def step(each: SimpleNamespace) -> int:
    """Bytes of the moments that one update of plain Adam makes."""
    for group in each.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    each.optimizer.step()
    return sum(state[name].nbytes for state in each.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))


def test_as_many_bytes_as_the_first_update_makes_and_none_after_it():
    both = chained(part(7), part(11))
    room = reserve_adam_memory(both)
    assert room is not None and room.nbytes == sum(step(each) for each in both.chained_optimizers)
    assert reserve_adam_memory(both) is None


def test_states_on_the_host_take_no_room_on_the_device(monkeypatch: pytest.MonkeyPatch):
    """Nor do states that verl offloads, or those that a checkpoint brings."""
    from verl.workers.engine_workers import TrainingWorker

    from retool_mcore.verl import workers

    assert reserve_adam_memory(part(7, SimpleNamespace(optimizer_cpu_offload=True))) is None
    loaded: list[Any] = []
    monkeypatch.setattr(TrainingWorker, "reset", lambda self: None)
    monkeypatch.setattr(workers, "new_seed_if_relaid_out", lambda engine, folder: f"of {folder}")
    monkeypatch.setattr(
        workers, "load_checkpoint", lambda _, folder, new_seed: loaded.append((worker._reserved, folder, new_seed))
    )
    for offloaded in (True, False):
        worker: Any = object.__new__(workers.SavingCriticWorker)
        nothing = dict.fromkeys(("train_batch", "lr_scheduler"))
        model, tf_config = SimpleNamespace(lora_rank=0), SimpleNamespace(num_moe_experts=None)
        worker.engine = SimpleNamespace(model_config=model, tf_config=tf_config, optimizer=part(7), **nothing)
        worker.engine_config = SimpleNamespace(forward_only=False, optimizer_offload=offloaded)
        worker.reset()
        assert (worker._reserved is None) == offloaded
    worker.load_checkpoint("checkpoint/actor")
    assert loaded == [(None, "checkpoint/actor", "of checkpoint")]


@pytest.mark.parametrize(("states", "moments"), [("compact", torch.float32), ("bfloat16", torch.bfloat16)])
def test_master_weights_that_are_states_are_counted(states: str, moments: torch.dtype):
    config = SimpleNamespace(
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
        store_param_remainders=True,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    assert bytes_of_states(config) == STATE_BYTES[states]
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False  # Megatron has them from the start
    assert bytes_of_states(config) == STATE_BYTES[states] - 2
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8, config.store_param_remainders = True, False
    config.main_params_dtype = torch.float32
    assert bytes_of_states(config) == STATE_BYTES[states] + 2, "whole master weights of 4 bytes instead of their rest"
