"""Patches for what Megatron-core, verl and SGLang assume of a CUDA device, where there is none.

Three rules keep the reach of the patches small. A ``torch.cuda`` function is replaced only when the
original can only raise on a machine without CUDA. A ``device="cuda"`` or ``pin_memory=True``
written into a file is redirected in that file alone: the file gets a view of ``torch``. Each set of
patches is applied only in the processes that need it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from retool_mcore.platforms.call_end import CALL_END_PATCH
from retool_mcore.platforms.cpu import seeded_sampling
from retool_mcore.platforms.engine_patches import ENGINE_PATCHES
from retool_mcore.platforms.patches import ModuleView, Patch, Seam
from retool_mcore.platforms.prefills import PREFILL_PATCH
from retool_mcore.platforms.versions import requirement
from retool_mcore.platforms.weight_sums import WEIGHT_SUMS_PATCH

CPU = torch.device("cpu")
TORCH = requirement("torch")
MEGATRON = requirement("megatron-core")
VERL = requirement("verl")
SGLANG = requirement("sglang")
NO_CUDA_ASSUMED = "Megatron-core takes its device from its tensors or from one setting"


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).partition(":")[0] == "cuda"


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that reads device="cuda" as the CPU and cannot pin memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _torch_view(*factories: str) -> Callable[[Any], ModuleView]:
    def view(module: Any) -> ModuleView:
        return ModuleView(module, **{name: _on_cpu(getattr(module, name)) for name in factories})

    return view


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _manual_seed(original: Any) -> Callable[[int], None]:
    # torch.manual_seed itself calls torch.cuda.manual_seed_all, so seed the generator directly.
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    return manual_seed


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_megatron_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _cuda_type_name(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs or self.device.type != "cpu":
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    return type_


def _one_gloo(original: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return init_process_group


def _adam_step_too(original: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        states = self._get_main_param_and_optimizer_states(model_param)
        original(self, model_param, {"step": states["step"], **tensors})  # restore_adam_steps overwrites it later

    return set_states


def _cpu_rollout(registry: Any) -> dict[tuple[str, str], str]:
    return {**registry, ("sglang", "async"): "retool_mcore.platforms.cpu.sglang_adapter.ServerAdapter"}


def _torch_cuda(name: str, replace: Callable[[Any], Any], reason: str) -> Patch:
    return Patch(
        target=f"torch.cuda.{name}", replace=replace, reason=reason, applies_to=TORCH, remove_when=NO_CUDA_ASSUMED
    )


def _torch_seen_by(module: str, *factories: str, reason: str) -> Patch:
    applies_to = SGLANG if module.startswith("sglang") else MEGATRON
    return Patch(
        target=f"{module}.torch",
        replace=_torch_view(*factories),
        reason=reason,
        applies_to=applies_to,
        remove_when="the file takes the device from its inputs and pins memory only where there is a device",
    )


def _router_logits(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: torch.dtype
) -> torch.Tensor:
    """Logits [..., E] of inp [..., H] by weight [E, H], in ``router_dtype``."""
    bias_E = None if bias is None else bias.to(router_dtype)
    return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), bias_E)


def _counts_are_moved(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


class _NullStream:
    """Stands for the one order in which a CPU does its work."""

    def record_event(self) -> _NullStream:
        return self

    def synchronize(self) -> None:
        """All work is done when the call returns."""


def _one_stream(module: Any) -> ModuleView:
    one = _NullStream()
    cuda = ModuleView(
        module.cuda, Stream=lambda: one, current_stream=lambda: one, stream=lambda stream: contextlib.nullcontext()
    )
    return ModuleView(module, cuda=cuda)


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
    """Gather tensors that differ in their first dimension, as NCCL does."""
    longest = max(len(output) for output in outputs)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, found in zip(outputs, gathered, strict=True):
        output.copy_(found[: len(output)])


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any) -> None:
    """The way back of ``_all_gather``: each rank gets the sum of what all have for it."""
    whole = torch.cat(inputs)
    torch.distributed.all_reduce(whole, group=group)
    output.copy_(whole.split([len(part) for part in inputs])[group.rank()])


def _uneven_collectives(module: Any) -> ModuleView:
    return ModuleView(
        module,
        distributed=ModuleView(module.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter),
    )


# Every process of a run.
PROCESS_PATCHES = (
    Patch(
        target="torch.distributed.init_process_group",
        replace=_one_gloo,
        reason='verl builds the backend "cpu:gloo,<device>:<backend>", which torch refuses when the device is the CPU',
        applies_to=TORCH,
        remove_when="verl.utils.distributed names the CPU's backend once",
    ),
)

# Processes that train, and those beside an engine that receive its weights.
ROLLOUT_CLASS = Patch(
    target="verl.workers.rollout.base._ROLLOUT_REGISTRY",
    replace=_cpu_rollout,
    reason="verl sends weights to SGLang by CUDA IPC and has no public way to register another sender",
    applies_to=VERL,
    remove_when="verl can register a rollout class, or sends CPU tensors itself",
)

# Processes that train with Megatron.
ENGINE_PATCHES = (
    *ENGINE_PATCHES,
    _torch_cuda("current_device", _always(lambda: CPU), "Megatron-core creates tensors on torch.cuda.current_device()"),
    _torch_cuda("synchronize", _always(lambda device=None: None), "Megatron-core waits for the device at checkpoints"),
    _torch_cuda("manual_seed", _manual_seed, "Megatron-core seeds the device's generator"),
    _torch_cuda("get_rng_state", _always(_get_rng_state), "Megatron-core's generator tracker reads the device's state"),
    _torch_cuda("random.get_rng_state", _always(_get_rng_state), "the tracker's fork reads the device's state here"),
    Patch(
        target="megatron.core.tensor_parallel.random._set_cuda_rng_state",
        replace=_always(_set_megatron_rng_state),
        reason="the tracker's fork writes the state of torch.cuda.default_generators, which is empty",
        applies_to=MEGATRON,
        remove_when=NO_CUDA_ASSUMED,
    ),
    Patch(
        target="torch.Tensor.cuda",
        replace=_always(lambda self, *args, **kwargs: self),
        reason="mbridge moves the built model, and Megatron-core its shared embeddings and indices, with cuda()",
        applies_to=TORCH,
        remove_when=NO_CUDA_ASSUMED,
    ),
    Patch(
        target="torch.Tensor.type",
        replace=_cuda_type_name,
        reason='Megatron-core\'s optimizers compare Tensor.type() with "torch.cuda.FloatTensor"',
        applies_to=TORCH,
        remove_when="Megatron-core's optimizers compare dtypes",
    ),
    _torch_seen_by(
        "megatron.core.optimizer.optimizer", "tensor", reason='the loss scale is created with device="cuda"'
    ),
    _torch_seen_by(
        "megatron.core.optimizer.clip_grads",
        "zeros",
        "tensor",
        reason='the gradient norm is created with device="cuda"',
    ),
    _torch_seen_by(
        "megatron.core.utils", "tensor", reason='the local norm of all gradients is made with device="cuda"'
    ),
    _torch_seen_by(
        "megatron.core.pipeline_parallel.schedules", "zeros", reason='the token count is created with device="cuda"'
    ),
    _torch_seen_by(
        "megatron.core.models.common.embeddings.rope_utils",
        "tensor",
        reason="with context parallelism the rotary indices are created in pinned memory",
    ),
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher.torch",
        replace=_one_stream,
        reason="the dispatcher of tokens to experts copies their counts to the host on a CUDA stream of its own",
        applies_to=MEGATRON,
        remove_when="it makes a stream only where counts are on a device",
    ),
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        replace=_counts_are_moved,
        reason="it turns counts into what gloo and NCCL take for sizes only on their way from a device",
        applies_to=MEGATRON,
        remove_when="it heeds as_numpy for a tensor of the CPU, too",
    ),
    Patch(
        target="megatron.core.tensor_parallel.mappings.torch",
        replace=_uneven_collectives,
        reason="with expert and tensor parallelism ranks gather unequal numbers of tokens, which gloo refuses",
        applies_to=MEGATRON,
        remove_when="torch's gloo gathers and scatters tensors of unequal sizes, as its NCCL does",
    ),
    Patch(
        target="megatron.core.transformer.moe.router.router_gating_linear",
        replace=_always(_router_logits),
        reason="the router's product names a function of Transformer Engine that is not even None where it is missing",
        applies_to=MEGATRON,
        remove_when="megatron.core.transformer.moe.moe_utils defines te_general_gemm without Transformer Engine",
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        replace=_adam_step_too,
        reason="a reshardable checkpoint has no step for each parameter, which torch's Adam keeps and it asks for",
        applies_to=MEGATRON,
        remove_when="it copies the states that it is given",
    ),
    _torch_seen_by(
        "megatron.core.dist_checkpointing.exchange_utils",
        "empty_like",
        reason='what another rank has read of a checkpoint is received on device="cuda"',
    ),
    ROLLOUT_CLASS,
    Patch(
        target="torch.Tensor.pin_memory",
        replace=_always(lambda self, device=None: self),
        reason="verl's asynchronous trainer keeps a copy of the weights in pinned memory",
        applies_to=TORCH,
        remove_when="verl.utils.megatron_utils pins memory only where there is a device",
    ),
)

# SGLang's scheduler and detokenizer processes.
SGLANG_PATCHES = (
    CALL_END_PATCH,
    PREFILL_PATCH,
    WEIGHT_SUMS_PATCH,
    Patch(
        target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        replace=seeded_sampling.with_seeds,
        reason="a request's sampling_seed counts in deterministic mode only, whose kernels are Triton's",
        applies_to=SGLANG,
        remove_when="SGLang heeds sampling_seed in every mode",
    ),
    Patch(
        target="sglang.srt.layers.sampler.multinomial_with_seed",
        replace=_always(seeded_sampling.multinomial_with_seed),
        reason="the hash behind a seeded draw is a Triton kernel",
        applies_to=SGLANG,
        remove_when="SGLang draws by a seed on a CPU, too",
    ),
    _torch_seen_by(
        "sglang.srt.state_capturer.base",
        "zeros",
        reason="the experts that a router chose are kept in pinned memory whatever the device",
    ),
)

_BRIDGE = "mbridge.core.llm_bridge.LLMBridge."
SEAMS = (
    Seam(
        target=f"{_BRIDGE}_build_base_config",
        parameters=("self", "text_config_key", "kwargs"),
        reason="fusions that need CUDA kernels are switched off in Megatron's configuration",
        applies_to=requirement("mbridge"),
        remove_when="verl's override_transformer_config reaches these settings before they are checked",
    ),
    Seam(
        target=f"{_BRIDGE}_get_transformer_layer_spec",
        parameters=("self", "vp_stage"),
        reason="layers are plain PyTorch where Transformer Engine does not exist",
        applies_to=requirement("mbridge"),
        remove_when="mbridge takes a layer spec as an argument",
    ),
)
