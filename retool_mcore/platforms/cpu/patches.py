"""Patches that let Megatron-core, verl and SGLang run without a CUDA device.

Three rules limit the scope of the patches. They replace a ``torch.cuda`` function only if the
original raises or does nothing without CUDA. They redirect a hard-coded ``device="cuda"`` or
``pin_memory=True`` only in the file that has it, by giving that file a view of ``torch``. Each set
of patches is applied only in the processes that need it. No gains are measured, because nothing
runs without these patches.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import training_patches
from retool_mcore.platforms.cpu import linear_attention, seeded_sampling
from retool_mcore.platforms.patches import Change, ModuleView, Patch, requirement
from retool_mcore.platforms.patches_verl import FORMAT, flattened

CPU = torch.device("cpu")
TORCH = requirement("torch")
MEGATRON = requirement("megatron-core")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory: replace device="cuda" by the CPU and ignore pin_memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).partition(":")[0] == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _manual_seed(seed: int) -> None:
    # Seed the generator directly, because torch.manual_seed calls torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(int(seed))


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


def _name_gloo_once(original: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return init_process_group


def _with_adam_step(original: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        states = self._get_main_param_and_optimizer_states(model_param)
        original(self, model_param, {"step": states["step"], **tensors})  # restore_adam_steps overwrites it later

    return set_states


def _load_from_bytes(data: bytes) -> Any:
    """torch's function of this name, which Megatron-core replaces by one that SGLang refuses."""
    return torch.load(io.BytesIO(data), weights_only=False)


_load_from_bytes.__module__ = "torch.storage"  # where the receiver finds torch's own


def _pickled(bucket: dict[str, Any]) -> bytes:
    megatrons = torch.storage._load_from_bytes
    torch.storage._load_from_bytes = _load_from_bytes
    try:
        return pickle.dumps(bucket)
    finally:
        torch.storage._load_from_bytes = megatrons


def _send_by_pickle(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's weight update: pickle a bucket as one tensor.

    torch's default, sharing by file descriptor, makes the server exit when the sender closes.
    Raises PlatformError if the server rejects a weight.
    """

    @functools.wraps(original)
    async def update_weights(
        engine: Any, params_batch: Any, device_mesh_key: str, device_mesh: Any, load_format: str | None = None
    ) -> None:
        if engine is None:  # only the first TP rank of an engine sends
            return
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        payloads = [_pickled(flattened(params_batch))] * device_mesh[device_mesh_key].size()
        reply = await engine.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=FORMAT, flush_cache=False)
        )
        if not reply.get("success", False):
            raise PlatformError(f"SGLang rejected the bucket of weights that starts with {params_batch[0][0]}: {reply}")

    return update_weights


def _counts_on_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


class _NullStream:
    """Replaces a CUDA stream; the CPU executes operations in order."""

    def record_event(self) -> _NullStream:
        return self

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the CPU works synchronously."""

    def synchronize(self) -> None:
        """Do nothing: the CPU works synchronously."""


def _one_stream(module: Any) -> ModuleView:
    one_stream = _NullStream()
    cuda = ModuleView(
        module.cuda,
        Stream=lambda device=None: one_stream,
        current_stream=lambda: one_stream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    return ModuleView(module, cuda=cuda)


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
    """all_gather for tensors with different first dimensions, which gloo does not support."""
    longest = max(len(output) for output in outputs)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, whole in zip(outputs, gathered, strict=True):
        output.copy_(whole[: len(output)])


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any) -> None:
    """reduce_scatter for tensors with different first dimensions; the inverse of _all_gather."""
    whole = torch.cat(inputs)
    torch.distributed.all_reduce(whole, group=group)
    output.copy_(whole.split([len(part) for part in inputs])[group.rank()])


def _uneven_collectives(module: Any) -> ModuleView:
    return ModuleView(
        module,
        distributed=ModuleView(module.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter),
    )


def _plain_torch(original: Any) -> Any:
    from retool_mcore.platforms.cpu.layers import PlainTorch  # imports Megatron, which SGLang's processes do not need

    return PlainTorch


def _plain_torch_of(original: Any) -> Callable[[Any], Any]:
    from retool_mcore.platforms.cpu.layers import PlainTorch

    def _get_backend_spec_provider(config: Any) -> Any:
        return PlainTorch()

    return _get_backend_spec_provider


def _delta_net(name: str) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        from retool_mcore.platforms.cpu import delta_net

        return getattr(delta_net, name)

    return replace


def _rms_norm(original: Any) -> Any:
    from retool_mcore.platforms.cpu.layers import RMSNorm

    return RMSNorm


def _torch_seen_by(module: str, *factories: str) -> Change:
    """Give ``module`` a view of torch whose tensor ``factories`` create CPU tensors."""

    def view(original: Any) -> ModuleView:
        return ModuleView(original, **{name: _on_cpu(getattr(original, name)) for name in factories})

    return Change(f"{module}.torch", None, view)


# Patches of every process of a run.
PROCESS_PATCHES = (
    Patch(
        changes=(
            Change(
                "torch.distributed.init_process_group",
                ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options",
                 "device_id", "_ranks"),
                _name_gloo_once,
            ),
        ),
        reason='verl builds the backend "cpu:gloo,<device>:<backend>", which torch refuses when the device is the CPU',
        gain="Without it no process group starts",
        applies_to=TORCH,
        remove_when="verl.utils.distributed lists the CPU's backend only once",
    ),
)  # fmt: skip

# Patch of the actor's workers, and of the engines' weight-sync workers.
WEIGHTS_PATCH = Patch(
    changes=(
        Change(
            "verl.workers.rollout.sglang_rollout.sglang_rollout.sgl_update_weights",
            ("engine", "params_batch", "device_mesh_key", "device_mesh", "load_format"),
            _send_by_pickle,
        ),
    ),
    reason="verl sends weights to SGLang by CUDA IPC, for which SGLang's helper fails on CPU tensors",
    gain="Without it engines never receive the trained weights",
    applies_to=requirement("verl"),
    remove_when="verl sends CPU tensors itself",
)

# Patches of processes that train with Megatron.
_CORE = "megatron.core."
_DISPATCHER = f"{_CORE}transformer.moe.token_dispatcher."
_HYBRID = f"{_CORE}models.gpt.experimental_attention_variant_module_specs"
_DELTA_NET = f"{_CORE}ssm.gated_delta_net."
ENGINE_PATCHES = (
    *training_patches(),
    Patch(
        changes=(
            # None, and torch's norm, because Transformer Engine is not installed.
            Change(f"{_CORE}models.gpt.gpt_layer_specs.TESpecProvider", None, _plain_torch),
            Change(f"{_CORE}transformer.transformer_block.LayerNormImpl", None, _rms_norm),
            Change(f"{_HYBRID}._get_backend_spec_provider", ("config",), _plain_torch_of),
        ),
        reason="Megatron-Bridge builds layers of Transformer Engine, which needs CUDA",
        gain="Without it no model is built on a CPU",
        applies_to=MEGATRON,
        remove_when="Megatron-core's local layers support packed sequences, sequence and context parallelism",
    ),
    Patch(
        changes=(
            Change(f"{_DELTA_NET}HAVE_FLA", None, _always(True)),
            Change(f"{_DELTA_NET}l2norm", None, _always(linear_attention.l2norm)),
            *(
                Change(f"{_DELTA_NET}{name}", None, _delta_net(name))
                for name in ("causal_conv1d", "chunk_gated_delta_rule")
            ),
        ),
        reason="Megatron-core's Gated DeltaNet layers call kernels of flash-linear-attention, which need CUDA; its own "
        "plain PyTorch path does not support packed sequences",
        gain="Without it no Qwen3.5 trains on a CPU",
        applies_to=MEGATRON,
        remove_when="Megatron-core's plain PyTorch path supports packed sequences and is used without CUDA",
    ),
    Patch(
        changes=(
            Change("torch.cuda.current_device", (), _always(lambda: CPU)),  # Megatron-core creates tensors on it
            Change("torch.cuda.synchronize", ("device",), _always(lambda device=None: None)),  # at checkpoints
            Change("torch.cuda.manual_seed", ("seed",), _always(_manual_seed)),
            Change("torch.cuda.get_rng_state", ("device",), _always(_get_rng_state)),  # in Megatron's RNG tracker
            Change("torch.cuda.random.get_rng_state", ("device",), _always(_get_rng_state)),  # in the tracker's fork
            # Megatron-Bridge calls it on the model, Megatron-core on shared embeddings and indices.
            Change("torch.Tensor.cuda", None, _always(lambda self, *args, **kwargs: self)),
            # Megatron-core's optimizers compare its result with "torch.cuda.FloatTensor".
            Change("torch.Tensor.type", None, _cuda_type_name),
            # verl's asynchronous trainer copies the weights to pinned memory.
            Change("torch.Tensor.pin_memory", None, _always(lambda self, device=None: self)),
        ),
        reason="Megatron-core, Megatron-Bridge and verl call torch.cuda without checking for a device",
        gain="Without it Megatron neither trains nor saves on a CPU",
        applies_to=TORCH,
        remove_when="Megatron-core takes its device from its tensors or from one setting",
    ),
    Patch(
        changes=(
            _torch_seen_by(f"{_CORE}optimizer.optimizer", "tensor"),  # the loss scale
            _torch_seen_by(f"{_CORE}optimizer.clip_grads", "zeros", "tensor"),  # the gradient norm
            _torch_seen_by(f"{_CORE}utils", "tensor"),  # the local norm of all gradients
            _torch_seen_by(f"{_CORE}pipeline_parallel.schedules", "zeros"),  # the token count
            _torch_seen_by(f"{_CORE}models.common.embeddings.rope_utils", "tensor"),  # rotary indices, pinned, with CP
            _torch_seen_by(f"{_CORE}dist_checkpointing.exchange_utils", "empty_like"),  # tensors of another rank
            Change("megatron.training.models.dist_utils.torch", None, _one_stream),  # to build DDP's buffers
            # The fork of the RNG tracker sets torch.cuda.default_generators, which is empty here.
            Change(
                f"{_CORE}tensor_parallel.random._set_cuda_rng_state",
                ("new_state", "device", "graph_safe"),
                _always(_set_megatron_rng_state),
            ),
        ),
        reason='Megatron-core writes device="cuda" or pinned memory into these files',
        gain="Without it Megatron neither trains nor saves on a CPU",
        applies_to=MEGATRON,
        remove_when="the files take the device from their inputs and pin memory only where there is a device",
    ),
    Patch(
        changes=(
            # The dispatcher copies token counts to the host on a separate CUDA stream.
            Change(f"{_DISPATCHER}torch", None, _one_stream),
            # The dispatcher converts counts to NumPy only if they are on a device.
            Change(
                f"{_DISPATCHER}maybe_move_tensor_to_cpu", ("tensor", "as_numpy", "record_stream"), _counts_on_the_host
            ),
            # Ranks gather different numbers of tokens, which NCCL supports and gloo does not.
            Change(f"{_CORE}tensor_parallel.mappings.torch", None, _uneven_collectives),
        ),
        reason="Megatron-core's experts assume CUDA streams and NCCL",
        gain="Without it no model with experts trains on a CPU",
        applies_to=MEGATRON,
        remove_when="Megatron-core's token dispatcher works on CPU tensors",
    ),
    Patch(
        changes=(
            Change(
                f"{_CORE}optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
                ("self", "model_param", "tensors"),
                _with_adam_step,
            ),
        ),
        reason="Megatron-core reads each parameter's step count from a reshardable checkpoint, which does not have it",
        gain="Without it no run resumes from a checkpoint of another layout",
        applies_to=MEGATRON,
        remove_when="Megatron-core's optimizer copies all states that it receives",
    ),
)

# Patches of SGLang's scheduler and detokenizer processes.
SGLANG_PATCHES = (
    Patch(
        changes=(
            # SGLang uses sampling_seed only in deterministic mode, which needs Triton kernels.
            Change(
                "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
                ("batch", "vocab_size"),
                seeded_sampling.with_seeds,
            ),
            # SGLang's hash for seeded sampling is a Triton kernel.
            Change(
                "sglang.srt.layers.sampler.multinomial_with_seed",
                ("logprobs", "seed", "positions"),
                _always(seeded_sampling.multinomial_with_seed),
            ),
            # SGLang stores routed experts in pinned memory on any device.
            _torch_seen_by("sglang.srt.state_capturer.base", "zeros"),
        ),
        reason="SGLang's seeded sampling needs Triton kernels, and its routed experts are in pinned memory",
        gain="Two runs with one seed sample the same first batch, and router replay R3 works",
        applies_to=requirement("sglang"),
        remove_when="SGLang uses sampling_seed in every mode and on a CPU, and pins memory only where a device exists",
    ),
    Patch(
        changes=(
            Change(
                "sglang.srt.layers.attention.fla.layernorm_gated.layernorm_fn",
                ("x", "weight", "bias", "z", "eps", "group_size", "norm_before_gate", "is_rms_norm", "activation"),
                _always(linear_attention.gated_rms_norm),
            ),
            Change(
                "sglang.srt.layers.elementwise.fused_sigmoid_mul",
                ("attn_output", "gate", "inplace"),
                _always(linear_attention.sigmoid_mul),
            ),
            Change(
                "sglang.srt.layers.elementwise.fused_gate_sigmoid_mul_add",
                ("hidden_states", "gate_weight", "shared_output", "final_hidden_states"),
                _always(linear_attention.gate_sigmoid_mul_add),
            ),
        ),
        reason="SGLang computes the gates of Qwen3.5 in Triton kernels",
        gain="Without it no model of Qwen3.5 runs on a CPU; its other kernels are in stubs/sgl_kernel/mamba.py",
        applies_to=requirement("sglang"),
        remove_when="SGLang computes all three in PyTorch on a CPU without AMX",
    ),
)
