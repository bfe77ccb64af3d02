"""The room held for Adam's states is as large as they are. On GPUs: numerics/test_gpu_parity.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.planner.memory import STATE_BYTES
from retool_mcore.verl.update_worker import bytes_of_states, reserve_adam_memory

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def part(count: int, *, on_cpu: bool = False) -> SimpleNamespace:
    parameters = [torch.nn.Parameter(torch.ones(count)), torch.nn.Parameter(torch.ones(3, 5))]
    config = SimpleNamespace(optimizer_cpu_offload=on_cpu, use_precision_aware_optimizer=False)
    return SimpleNamespace(optimizer=torch.optim.AdamW(parameters), config=config)


def test_as_many_bytes_as_the_first_update_makes_and_none_after_it():
    parts = [part(7), part(11)]
    optimizer = SimpleNamespace(chained_optimizers=parts)
    room, made = reserve_adam_memory(optimizer), 0
    for each in parts:
        for parameter in each.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        each.optimizer.step()
        for state in each.optimizer.state.values():
            made += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    assert room is not None and room.nbytes == made
    assert reserve_adam_memory(optimizer) is None
    assert reserve_adam_memory(part(7, on_cpu=True)) is None


def test_a_checkpoints_states_take_the_room_and_another_layout_a_new_seed(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import workers

    def load(engine: str, folder: str, new_seed: str) -> None:
        loaded.extend([engine, worker._reserved, folder, new_seed])

    loaded = list[Any]()
    monkeypatch.setattr(workers, "new_seed_if_relaid_out", lambda engine, folder: f"of {folder}")
    monkeypatch.setattr(workers, "load_checkpoint", load)
    worker: Any = object.__new__(workers.SavingCriticWorker)
    worker.engine, worker._reserved = "engine", "room"
    worker.load_checkpoint("checkpoint/actor")
    assert loaded == ["engine", None, "checkpoint/actor", "of checkpoint"]


@pytest.mark.parametrize(("states", "moments"), [("compact", torch.float32), ("bfloat16", torch.bfloat16)])
def test_master_weights_that_are_states_are_counted(states: str, moments: torch.dtype):
    config = SimpleNamespace(
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
        store_param_remainders=True,
        main_params_dtype=torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    assert bytes_of_states(config) == STATE_BYTES[states]
    config.store_param_remainders = False
    assert bytes_of_states(config) == STATE_BYTES[states] + 2, "whole master weights of 4 bytes instead of their rest"
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False  # Megatron has them from the start
    assert bytes_of_states(config) == STATE_BYTES[states] - 2
