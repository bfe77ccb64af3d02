"""Patches of verl: packing, micro-batches, pipeline chunks, log-probs, weight sync, key, ports.

**Packing without device synchronization.** verl 0.9.1 moves a micro-batch to the device. It then
reads the sequence lengths back more than ten times per micro-batch, to pack and pad in Python. Each
read waits for all queued work on the device, which then idles until Python continues. Here the
lengths stay on the host, and one indexed copy replaces each loop over sequences. The host can then
prepare a micro-batch while the device computes the previous one.

Suffixes: N tokens of all sequences of a micro-batch, R rows of the packed and padded batch,
B responses padded to W tokens, L tokens of all responses.
"""

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from itertools import accumulate, chain
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from retool_mcore.platforms.cuda.log_probs import entropy_on_request, log_probs_by_transformer_engine
from retool_mcore.platforms.network import LISTEN_PORTS, engine_key
from retool_mcore.platforms.patches import Change, Patch, requirement

VERL_REQUIREMENT = requirement("verl")
_MCORE = "verl.models.mcore."
_ENGINE = "verl.workers.engine.megatron.transformer_impl."

PADDING = -1  # in place of a token's index
KEPT = 16  # cached layouts on the device; a pipeline needs a few for each of its micro-batches
LAYOUT = "retool_layout"  # attribute of Megatron's PackedSeqParams

_known_lengths = WeakTensorKeyDictionary()  # offsets of a nested tensor -> lengths of its sequences


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``tensor`` to ``device`` asynchronously."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _send_numbers(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return send(torch.from_numpy(numbers), device)


def lengths_of(nested: torch.Tensor) -> tuple[int, ...]:
    """Lengths of a jagged tensor's sequences.

    Reads them from the device only if the tensor was not created by ``jagged``.
    """
    offsets = nested.offsets()
    if offsets not in _known_lengths:
        _known_lengths[offsets] = tuple(offsets.diff().tolist())
    return _known_lengths[offsets]


def jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Create a jagged tensor of ``values`` [N, ...] and cache its ``lengths`` on the host."""
    _known_lengths[offsets] = lengths
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def is_jagged(value: Any) -> bool:
    """Whether ``value`` is a jagged tensor without gaps whose second dimension is ragged."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.jagged
        and value.lengths() is None
        and value._ragged_idx == 1  # type: ignore[attr-defined]
    )


def starts_of(lengths: Sequence[int]) -> np.ndarray:
    """The index of each sequence's first token among all tokens; int64 [sequences]."""
    return np.cumsum(lengths, dtype=np.int64) - np.asarray(lengths)


@dataclass(frozen=True)
class Layout:
    """The positions of tokens in packed sequences.

    Each sequence is padded to a multiple of ``multiple`` tokens. The last one is padded further, so
    that the total is a multiple of ``total_multiple``.
    """

    lengths: tuple[int, ...]
    multiple: int
    total_multiple: int

    @property
    def padded(self) -> list[int]:
        lengths = [-(-length // self.multiple) * self.multiple for length in self.lengths]
        lengths[-1] += -sum(lengths) % self.total_multiple
        return lengths

    def rows(self, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """For each row, the index of its token among N, or PADDING, and its position; int64 [R].

        ``shift`` = 1 returns the next token in the sequence, as labels need.
        """
        padded = self.padded
        sequences = np.repeat(np.arange(len(padded)), padded)
        positions = np.arange(len(sequences)) - starts_of(padded)[sequences] + shift
        inside = positions < np.asarray(self.lengths)[sequences]
        return np.where(inside, starts_of(self.lengths)[sequences] + positions, PADDING), positions


@lru_cache(maxsize=2 * KEPT)  # for tokens and for labels
def _rows_of(
    layout: Layout, shift: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Token index and position of each row, int64 [R], and indices of padding rows or None."""
    sources, positions = layout.rows(shift)
    empty = np.flatnonzero(sources == PADDING)
    sources[empty] = positions[empty] = 0
    return (
        _send_numbers(sources, device),
        _send_numbers(positions, device),
        _send_numbers(empty, device) if empty.size else None,
    )


@lru_cache(maxsize=KEPT)
def _places_of(layout: Layout, device: torch.device) -> torch.Tensor:
    """The row of each token, int64 [N]."""
    return _send_numbers(np.flatnonzero(layout.rows()[0] != PADDING), device)


@lru_cache(maxsize=KEPT)
def _bounds_of(layout: Layout, device: torch.device) -> torch.Tensor:
    return _send_numbers(np.asarray([0, *accumulate(layout.padded)], dtype=np.int32), device)


def send_batch(batch: Any, device: torch.device) -> Any:
    """Copy verl's micro-batch, a TensorDict, to ``device`` and cache its lengths on the host."""
    sent = batch.copy().clear_device_()
    offsets: dict[tuple[int, ...], torch.Tensor] = {}  # shared by all columns with the same lengths
    for name in batch.keys():  # noqa: SIM118  iterating a TensorDict yields its rows
        value = batch.get(name)
        if not isinstance(value, torch.Tensor) or value.device == device:
            continue
        if is_jagged(value):
            lengths = lengths_of(value)
            if lengths not in offsets:
                offsets[lengths] = send(value.offsets(), device)
            sent.set(name, jagged(send(value.values(), device), offsets[lengths], lengths))
        elif not value.is_nested:
            sent.set(name, send(value, device))
    return sent


def row_selector(rows: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that selects ``rows``, in this order, from a jagged tensor of a batch."""

    @cache  # columns of the same lengths share an index
    def index(lengths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        kept = tuple(lengths[row] for row in rows)
        shifts = starts_of(lengths)[np.asarray(rows)] - starts_of(kept)
        tokens = np.repeat(shifts, kept) + np.arange(sum(kept))
        return _send_numbers(tokens, device), send(torch.tensor([0, *accumulate(kept)]), device), kept

    def take(nested: torch.Tensor) -> torch.Tensor:
        tokens, offsets, kept = index(lengths_of(nested), nested.device)
        return jagged(nested.values().index_select(0, tokens), offsets, kept)

    return take


def selected_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's row selection: select rows of jagged tensors by one index, without unbinding."""

    @wraps(original)
    def index_select_tensor_dict(batch: Any, indices: torch.Tensor | list[int]) -> Any:
        if batch is None or not len(indices):
            return original(batch, indices)
        names = [name for name in batch.keys() if is_jagged(batch.get(name))]  # noqa: SIM118
        take = row_selector(indices if isinstance(indices, list) else indices.tolist())
        selected = original(batch.exclude(*names), indices)
        for name in names:
            selected.set(name, take(batch.get(name)))
        return selected

    return index_select_tensor_dict


def _prefetch_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the engine's forward step: copy its micro-batch to the device asynchronously first."""

    @wraps(original)
    def forward_step(self: Any, batch_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        from verl.utils.device import get_device_id, get_device_name

        index = get_device_id()
        device = index if isinstance(index, torch.device) else torch.device(get_device_name(), index)
        return original(self, iter([send_batch(next(batch_iter), device)]), *args, **kwargs)

    return forward_step


def packed_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's packing of a jagged tensor for Megatron.

    Calls the original for context parallelism, where this brings no gain, and for unusual layouts.
    """

    @wraps(original)
    def preprocess_thd_engine(
        input_ids: torch.Tensor,
        pre_process: bool = True,
        need_roll: bool = False,
        use_fp8_padding: bool = False,
        *,
        cp_layout: str = "zigzag",
        **unusual: Any,
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        from megatron.core import parallel_state
        from megatron.core.packed_seq_params import PackedSeqParams

        context_parallel = parallel_state.get_context_parallel_world_size() > 1
        if context_parallel or any(value is not None for value in unusual.values()):
            return original(input_ids, pre_process, need_roll, use_fp8_padding, cp_layout=cp_layout, **unusual)
        multiple = total = parallel_state.get_tensor_model_parallel_world_size()
        if use_fp8_padding:  # as verl pads for Transformer Engine's FP8 GEMMs
            multiple, total = lcm(16, multiple), 128 * multiple
        layout = Layout(lengths_of(input_ids), multiple, total)
        bounds, longest = _bounds_of(layout, input_ids.device), max(layout.padded)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        setattr(params, LAYOUT, layout)
        if not pre_process:
            return input_ids, params, None
        sources_R, positions_R, empty = _rows_of(layout, int(need_roll), input_ids.device)
        rows = input_ids.values().index_select(0, sources_R)
        if empty is not None:
            rows.index_fill_(0, empty, 0)
        return rows.unsqueeze(0), params, positions_R.unsqueeze(0)

    return preprocess_thd_engine


def unpacked_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's unpacking of the last pipeline stage's output, the inverse of packing."""

    @wraps(original)
    def postprocess_thd_engine(
        output: torch.Tensor,
        packed_seq_params: Any,
        input_ids: torch.Tensor,
        batch_size: int,
        post_process: bool = True,
        **rest: Any,
    ) -> torch.Tensor:
        layout: Layout | None = getattr(packed_seq_params, LAYOUT, None)
        if layout is None or not post_process:
            return original(output, packed_seq_params, input_ids, batch_size, post_process, **rest)
        tokens = output[0].index_select(0, _places_of(layout, output.device))
        return jagged(tokens, input_ids.offsets(), lengths_of(input_ids))

    return postprocess_thd_engine


@lru_cache(maxsize=KEPT)
def _moved(
    prompts: tuple[int, ...], responses: tuple[int, ...], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each response token, its source among N tokens and its target in B * W; int64 [L].

    The source is the preceding position, where the model predicts the token.
    """
    counts_B = np.asarray(responses)
    within_L = np.arange(counts_B.sum()) - np.repeat(starts_of(responses), counts_B)
    before_B = starts_of([*map(sum, zip(prompts, responses, strict=True))]) + np.asarray(prompts) - 1
    sources = np.repeat(before_B, counts_B) + within_L
    places = np.repeat(np.arange(len(responses)) * width, counts_B) + within_L
    return _send_numbers(sources, device), _send_numbers(places, device)


def padded_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's padding of a model's output to responses [B, W].

    Calls the original if the batch itself is padded.
    """

    @wraps(original)
    def no_padding_2_padding(tensor: torch.Tensor, data: Any) -> torch.Tensor:
        if not (is_jagged(data["prompts"]) and is_jagged(data["responses"])):
            return original(tensor, data)
        from verl.utils.tensordict_utils import get_non_tensor_data

        values_N = tensor.values() if tensor.is_nested else tensor
        prompts, responses = lengths_of(data["prompts"]), lengths_of(data["responses"])
        assert sum(prompts) + sum(responses) == len(values_N), "an output has as many tokens as its sequences"
        assert all(prompts), "a response's first token is predicted at the last token of its prompt"
        max_response: Any = get_non_tensor_data(data, "max_response_len", -1)
        width: int = max(responses) if max_response < 0 else max_response
        sources_L, places_L = _moved(prompts, responses, width, values_N.device)
        rest = values_N.shape[1:]
        padded = values_N.new_zeros(len(responses) * width, *rest)
        return padded.index_copy(0, places_L, values_N.index_select(0, sources_L)).view(-1, width, *rest)

    return no_padding_2_padding


def join(parts: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Join the jagged tensors of micro-batches into the batch's. ``rows``: the rows of each."""
    lengths = tuple(chain.from_iterable(lengths_of(part) for part in parts))
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=parts[0].offsets().dtype)
    values = torch.cat([part.values() for part in parts])
    whole = jagged(values, send(offsets, values.device), lengths)
    return row_selector(np.argsort([*chain.from_iterable(rows)]).tolist())(whole)


def joined_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's batch post-processing: join the outputs of micro-batches by one index."""

    @wraps(original)
    def postprocess_batch_func(output_lst: list[dict[str, Any]], indices: Any, data: Any) -> dict[str, Any]:
        outputs = [output.get("model_output", {}) for output in output_lst]
        if indices is None or not all(is_jagged(value) for output in outputs for value in output.values()):
            return original(output_lst=output_lst, indices=indices, data=data)
        rest = [{name: value for name, value in output.items() if name != "model_output"} for output in output_lst]
        summary = original(output_lst=rest, indices=indices, data=data)
        names = dict.fromkeys(chain.from_iterable(outputs))
        summary["model_output"] = {name: join([output[name] for output in outputs], indices) for name in names}
        return summary

    return postprocess_batch_func


_FORWARD_STEP = ("self", "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func")
_PREPROCESS = ("input_ids", "pre_process", "need_roll", "use_fp8_padding", "local_cp_size", "min_local_rows",
               "pad_to_length_bucket", "cp_layout")  # fmt: skip
_POSTPROCESS = ("output", "packed_seq_params", "input_ids", "batch_size", "post_process", "local_cp_size", "cp_layout")
PACKING_PATCH = Patch(
    changes=(
        Change("verl.utils.tensordict_utils.index_select_tensor_dict", ("batch", "indices"), selected_by_index),
        Change(f"{_ENGINE}MegatronEngineWithLMHead.forward_step", _FORWARD_STEP, _prefetch_batch),
        Change(f"{_ENGINE}MegatronEngineWithValueHead.forward_step", _FORWARD_STEP, _prefetch_batch),
        Change(f"{_MCORE}model_forward.preprocess_thd_engine", _PREPROCESS, packed_by_index),
        Change(f"{_MCORE}model_forward.postprocess_thd_engine", _POSTPROCESS, unpacked_by_index),
        Change(f"{_MCORE}model_forward_fused.preprocess_thd_engine", _PREPROCESS, packed_by_index),
        Change(f"{_MCORE}model_forward_fused.postprocess_thd_engine", _POSTPROCESS, unpacked_by_index),
        Change("verl.workers.utils.losses.no_padding_2_padding", ("tensor", "data"), padded_by_index),
        Change(f"{_ENGINE}postprocess_batch_func", ("output_lst", "indices", "data"), joined_by_index),
    ),
    reason="to pack, pad and join sequences, verl reads their lengths back from the device, which then idles until the "
    "host answers, and loops over the sequences",
    gain="An update of 512 responses of 0.5B takes 376 us of host time per response instead of 2,090: 0.9 s of an 8 s "
    "step. SFT of 7B in FP8 on two H200: 75.1 % MFU instead of 72.5; no gain in bfloat16",
    applies_to=VERL_REQUIREMENT,
    remove_when="verl's Megatron engine packs, pads and joins by one index, from lengths that it has on the host",
)

MIN_MICRO_BATCHES = "min_num_micro_batch"  # in a batch's non-tensor data: minimum number of micro-batches


def _with_min_micro_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_micro_batches(data: Any, **kwargs: Any) -> Any:
        from verl.utils.tensordict_utils import get_non_tensor_data

        kwargs["min_num_micro_batch"] = get_non_tensor_data(data, MIN_MICRO_BATCHES, kwargs.get("min_num_micro_batch"))
        return original(data=data, **kwargs)

    return prepare_micro_batches


MICRO_BATCH_PATCH = Patch(  # memory.recompute = "auto" applies it on every platform
    changes=(
        Change(
            f"{_ENGINE}prepare_micro_batches",
            ("data", "dp_group", "num_batches_divided_by", "same_micro_num_in_dp", "min_num_micro_batch",
             "use_dynamic_bsz_balance"),
            _with_min_micro_batches,
        ),
    ),
    reason="the budget of a micro-batch must fit the longest sequence, and verl fills every micro-batch up to it",
    gain='SFT of 7B on two H200 with memory.recompute = "auto" and DP 2: 54.8 % MFU instead of 51.9 with CP 2',
    applies_to=VERL_REQUIREMENT,
    remove_when="verl's Megatron engine takes min_num_micro_batch from its data",
)  # fmt: skip


def _chunks_share_a_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the original for the first model chunk, then register the hooks of all chunks.

    Megatron's interleaved schedule needs lists with one hook per chunk.
    """

    @wraps(original)
    def register_megatron_training_hooks(model: list[Any], optimizer: Any) -> None:
        original(model[:1], optimizer)
        if len(model) == 1:
            return
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        for name, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
            if getattr(config, name) is not None:
                setattr(config, name, [getattr(chunk, method) for chunk in model])

    return register_megatron_training_hooks


CHUNK_PATCH = Patch(
    changes=(Change(f"{_ENGINE}register_megatron_training_hooks", ("model", "optimizer"), _chunks_share_a_config),),
    reason="with interleaved chunks and overlapped gradient reduction verl rejects a value that it has set itself",
    gain="Interleaved pipeline stages work; without it the run fails at its start",
    applies_to=VERL_REQUIREMENT,
    remove_when="verl sets the functions of all chunks once for the configuration that they share",
)

# memory.fused_cross_entropy, on CUDA: cuda/log_probs.py
LOG_PROB_PATCH = Patch(
    changes=(
        # LinearCrossEntropy.apply, which has no inspectable parameters
        Change(f"{_MCORE}model_forward_fused.linear_cross_entropy", None, log_probs_by_transformer_engine),
        Change(f"{_MCORE}get_mcore_forward_fused_model_engine_fn", ("hf_config",), entropy_on_request),
    ),
    reason="verl's kernel computes the output layer two more times, slower than cuBLAS, and computes entropies even if "
    "no setting needs them; its plain path copies the logits to float32",
    gain="SFT of 7B on two H200: 50.9 % MFU instead of 49.5; 2 bytes per logit instead of 14",
    applies_to=VERL_REQUIREMENT,
    remove_when="verl computes log-probabilities with a kernel that neither copies nor recomputes the logits, and "
    "passes calculate_entropy to it",
)

ALIGNED = 64  # bytes: alignment of each matrix, sufficient for any dtype
FORMAT = "flattened_bucket"  # SGLang's name


def flattened(named: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Copy the tensors into one allocation. Returns SGLang's flattened bucket with its metadata."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    starts = [0, *accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for _, tensor in named)]
    bucket_B = torch.empty(starts.pop(), dtype=torch.uint8, device=named[0][1].device)
    metadata = []
    for (name, tensor), start in zip(named, starts, strict=True):
        end, shape = start + tensor.nbytes, tuple(tensor.shape)  # SGLang unpickles torch.Size several times slower
        bucket_B[start:end].view(tensor.dtype).view(shape).copy_(tensor.detach())
        metadata.append(FlattenedTensorMetadata(name, shape, tensor.dtype, start, end, tensor.nbytes))  # pyright: ignore[reportArgumentType]
    return {"flattened_tensor": bucket_B, "metadata": metadata}


def send_as_one_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's weight update: send a bucket as one tensor.

    Calls the original if a load format is given. Does not flush the engine's prefix cache, because
    verl flushes it after the last bucket.
    """

    @wraps(original)
    async def update_weights(
        engine: Any, params_batch: Any, device_mesh_key: str, device_mesh: Any, load_format: str | None = None
    ) -> Any:
        if load_format is not None:
            return await original(engine, params_batch, device_mesh_key, device_mesh, load_format)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        bucket = flattened(params_batch)  # must live until the engine has answered
        mine: Any = MultiprocessingSerializer.serialize(bucket)
        mesh = device_mesh[device_mesh_key]
        payloads: list[Any] | None = [None] * mesh.size() if mesh.get_local_rank() == 0 else None
        dist.gather_object(mine, payloads, dst=mesh.mesh.flatten().tolist()[0], group=mesh.get_group())
        if payloads is None:
            return None
        return await engine.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=FORMAT, flush_cache=False)
        )

    return update_weights


FLAT_BUCKET_PATCH = Patch(  # on CUDA, in workers that share their devices with an engine
    changes=(
        Change(
            "verl.workers.rollout.sglang_rollout.sglang_rollout.sgl_update_weights",
            ("engine", "params_batch", "device_mesh_key", "device_mesh", "load_format"),
            send_as_one_tensor,
        ),
    ),
    reason="verl sends SGLang a CUDA handle for each matrix, and SGLang opens each: thousands in a model with experts",
    gain="Weight sync of an eighth of Qwen3-30B-A3B's layers: 0.47 s with this patch (two H100), 1.9 s "
    "without it and with a gather for each expert (two H200, in a step of 22 s)",
    applies_to=VERL_REQUIREMENT,
    remove_when="verl sends SGLang flattened buckets",
)


def _with_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def _get_session(self: Any) -> AsyncIterator[Any]:
        async with original(self) as session:
            if key := engine_key():
                session.headers["Authorization"] = f"Bearer {key}"
            yield session

    return _get_session


API_KEY_PATCH = Patch(  # in processes that send weights to SGLang
    changes=(
        Change(
            "verl.workers.rollout.sglang_rollout.http_server_engine.AsyncHttpServerAdapter._get_session",
            ("self",),
            _with_key,
        ),
    ),
    reason="verl sends weights to SGLang's server without the API key that the server may require",
    gain="Security: other users of the machine cannot make SGLang unpickle data, which would run their code",
    applies_to=VERL_REQUIREMENT,
    remove_when="verl's adapter sends server_args.api_key with each request",
    upstream="https://github.com/sgl-project/sglang/issues/30165",
)


def _below_client_ports(original: Callable[..., None]) -> Callable[..., None]:
    """Make verl search for a free port from a random start in LISTEN_PORTS.

    From a fixed start, two runs that start at the same time would find the same port.
    """

    @wraps(original)
    def _get_master_addr_port(
        self: Any, pg: Any, bundle_index: int = 0, master_port_range: list[int] | None = None
    ) -> None:
        first, end = LISTEN_PORTS
        master_port_range = master_port_range or [random.randrange(first, (first + end) // 2), end]
        original(self, pg, bundle_index, master_port_range)

    return _get_master_addr_port


MASTER_PORT_PATCH = Patch(
    changes=(
        Change(
            "verl.single_controller.ray.base.RayWorkerGroup._get_master_addr_port",
            ("self", "pg", "bundle_index", "master_port_range"),
            _below_client_ports,
        ),
    ),
    reason="verl picks a store's port seconds before the store listens, and Linux may assign it to a client meanwhile",
    gain="Two runs that start at the same time, or a quickstart during another run, do not fail with EADDRINUSE",
    applies_to=VERL_REQUIREMENT,
    remove_when="verl's trainer passes its worker groups a master_port_range",
)

# With Megatron, on CPU and CUDA; of these Ascend uses only MICRO_BATCH_PATCH.
TRAINING_PATCHES = (PACKING_PATCH, MICRO_BATCH_PATCH, CHUNK_PATCH)
