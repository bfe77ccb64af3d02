"""verl's Megatron engine for device `cpu`.

verl imports this module through ``model.external_lib`` in every worker.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch

from retool_mcore.platforms.cpu.patches import ENGINE_PATCHES
from retool_mcore.platforms.patches import apply_all

apply_all(ENGINE_PATCHES)  # before a Megatron model is built; verl's workers offer no earlier moment

from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead  # noqa: E402

from retool_mcore.platforms.cpu import bridge  # noqa: E402, F401  registers the plain-PyTorch bridges


def _expected_on_cpu(record: logging.LogRecord) -> bool:
    # Megatron's tracker warns when the CPU's generator moves inside its fork. Here the CPU's
    # generator is the one that it forks.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_expected_on_cpu)


def _adam_groups(optimizer: Any) -> Iterator[tuple[torch.optim.Adam, dict[str, Any]]]:
    """The parameter groups of a Megatron optimizer, each with the torch Adam it belongs to."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if adam is None:  # a rank without parameters of its own
            continue
        assert isinstance(adam, torch.optim.Adam), f"expected torch's Adam, got {type(adam)}"
        for group in adam.param_groups:
            yield adam, group


def materialise_adam_state(optimizer: Any) -> None:
    """Give every parameter of a Megatron optimizer the state torch's Adam makes in its first step.

    Megatron's distributed optimizer saves and loads checkpoints as if the state, ``step`` included,
    were there from the start, which holds for Transformer Engine's Adam. The values are those that
    Adam itself starts with.
    """
    for adam, group in _adam_groups(optimizer):
        for param in group["params"]:
            state = adam.state[param]
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
            state.setdefault("exp_avg", torch.zeros_like(param))
            state.setdefault("exp_avg_sq", torch.zeros_like(param))


def restore_adam_steps(optimizer: Any) -> None:
    """Give every parameter the step count that its checkpoint has.

    Megatron's distributed optimizer loads the count into the parameter groups, then one shared
    tensor of it into all parameters. It then overwrites that tensor with the count from before the
    load (distrib_optimizer.py, load_state_dict and _set_main_param_and_optimizer_states). Adam
    would silently start its bias correction again.
    """
    for adam, group in _adam_groups(optimizer):
        for param in group["params"]:
            adam.state[param]["step"] = torch.tensor(float(group["step"]), dtype=torch.float32)


class _AdamFromTheStart:
    def _build_optimizer(self) -> Any:
        optimizer = super()._build_optimizer()  # type: ignore[misc]
        materialise_adam_state(optimizer)
        return optimizer

    @torch.no_grad()
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # In float32 the optimizer's main weights are the model's own, and autograd forbids writing
        # to them: hence no_grad.
        super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        restore_adam_steps(self.optimizer)  # type: ignore[attr-defined]


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class CpuMegatronEngine(_AdamFromTheStart, MegatronEngineWithLMHead):
    """The policy, and the reference model."""


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu")
class CpuMegatronValueEngine(_AdamFromTheStart, MegatronEngineWithValueHead):
    """The critic."""
