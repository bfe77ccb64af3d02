"""verl's Megatron engine for device `cpu`.

verl imports this module through ``model.external_lib`` in every process that has a model's
configuration. Only those that build an engine import Megatron-Bridge, which takes seconds.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from retool_mcore.platforms.cpu.bridge import import_bridge
from retool_mcore.platforms.cpu.patches import ENGINE_PATCHES
from retool_mcore.platforms.patches import apply_all


def _expected_on_cpu(record: logging.LogRecord) -> bool:
    # Megatron's RNG tracker warns if the CPU's RNG state changes inside its fork. On this platform
    # the tracker forks the CPU's RNG itself.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_expected_on_cpu)


def _adam_groups(optimizer: Any) -> Iterator[tuple[torch.optim.Adam, dict[str, Any]]]:
    """Yield the parameter groups of a Megatron optimizer, each with its torch Adam."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if adam is None:  # this rank has no parameters
            continue
        assert isinstance(adam, torch.optim.Adam), f"expected torch's Adam, got {type(adam)}"
        for group in adam.param_groups:
            yield adam, group


def materialise_adam_state(optimizer: Any) -> None:
    """Create the states that torch's Adam would create in its first step, with the same values.

    Megatron's distributed optimizer assumes in checkpoints that the states, including ``step``,
    exist from the start, as with Transformer Engine's Adam.
    """
    for adam, group in _adam_groups(optimizer):
        for param in group["params"]:
            state = adam.state[param]
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
            state.setdefault("exp_avg", torch.zeros_like(param))
            state.setdefault("exp_avg_sq", torch.zeros_like(param))


def restore_adam_steps(optimizer: Any) -> None:
    """Set every parameter's step count to that of the loaded checkpoint.

    Megatron's distributed optimizer loads the count into the parameter groups, then into one tensor
    that all parameters share. It then overwrites that tensor with the count from before the load
    (distrib_optimizer.py, load_state_dict and _set_main_param_and_optimizer_states). Adam would
    silently restart its bias correction.
    """
    for adam, group in _adam_groups(optimizer):
        for param in group["params"]:
            adam.state[param]["step"] = torch.tensor(float(group["step"]), dtype=torch.float32)


def prepare() -> None:
    """Import Megatron-Bridge and apply the patches of a process that trains with Megatron."""
    import_bridge()  # before verl does
    apply_all(ENGINE_PATCHES)


class _CpuEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        prepare()
        super().__init__(*args, **kwargs)

    def _build_optimizer(self) -> Any:
        optimizer = super()._build_optimizer()  # type: ignore[misc]
        materialise_adam_state(optimizer)
        return optimizer

    @torch.no_grad()
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # no_grad, because in float32 the optimizer's main weights are the model's parameters, and
        # autograd forbids in-place writes to them.
        super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        restore_adam_steps(self.optimizer)  # type: ignore[attr-defined]


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class CpuMegatronEngine(_CpuEngine, MegatronEngineWithLMHead):
    """The engine of the policy and the reference model."""


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu")
class CpuMegatronValueEngine(_CpuEngine, MegatronEngineWithValueHead):
    """The engine of the critic."""
