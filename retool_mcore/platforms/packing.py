"""Packs a micro-batch for Megatron without a wait for the device.

verl 0.9.1 moves a micro-batch's sequences to the device and then reads their lengths back, more
than ten times for each micro-batch, to pack them in Python. Each read waits until the device has
done all that it was given, and then the device waits for Python: of an FP8 step of a 7B model it
was idle for 8 to 9 % (perf/history.jsonl). Here the lengths stay on the host, and one indexed copy
does what packing does there to one sequence after another. The host prepares a micro-batch while
the device still works on the one before.

Suffixes: N tokens of all sequences of a micro-batch, R rows that one rank of context parallelism
holds of them, padding included.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement

PADDING = -1
KEPT = 16  # layouts on the device: of the micro-batches that a pipeline works on, each of a few kinds
PLACED = "retool_placed"  # attribute of Megatron's PackedSeqParams

_known_lengths = WeakTensorKeyDictionary()  # offsets of a nested tensor -> lengths of its sequences


@dataclass(frozen=True)
class Layout:
    """Where the tokens of packed sequences lie on the ranks of context parallelism.

    Every sequence is padded to a multiple of ``multiple``, and the last one further, so that all
    have a multiple of ``total_multiple``. With several ranks each sequence is cut into twice as
    many chunks, and rank r has the chunks r and -1 - r (Megatron's "zigzag" order).
    """

    lengths: tuple[int, ...]
    multiple: int
    total_multiple: int
    ranks: int = 1

    @property
    def padded(self) -> list[int]:
        found = [-(-length // self.multiple) * self.multiple for length in self.lengths]
        found[-1] += -sum(found) % self.total_multiple
        return found

    def sources(self, rank: int, shift: int = 0) -> np.ndarray:
        """For each row of ``rank``, which of the N tokens it holds, or PADDING; int64 [R].

        ``shift`` = 1: the token after it in its sequence, as labels are.
        """
        sequences, positions = positions_of(self, rank)
        positions = positions + shift
        lengths = np.asarray(self.lengths)
        starts = np.cumsum(lengths) - lengths
        return np.where(positions < lengths[sequences], starts[sequences] + positions, PADDING)

    def rows(self) -> np.ndarray:
        """Where each token lies in the rows of all ranks, one rank after another; int64 [N]."""
        sources = np.concatenate([self.sources(rank) for rank in range(self.ranks)])
        found = np.empty(sum(self.lengths), dtype=np.int64)
        held = np.flatnonzero(sources != PADDING)
        found[sources[held]] = held
        return found


@lru_cache(maxsize=KEPT)
def positions_of(layout: Layout, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence and position in it, both int64 [R], of each row of ``rank``; not to be changed."""
    sequences, positions = [], []
    for sequence, padded in enumerate(layout.padded):
        chunk = padded // (2 * layout.ranks)
        chunks = [(rank * chunk, chunk), (padded - (rank + 1) * chunk, chunk)] if layout.ranks > 1 else [(0, padded)]
        for start, count in chunks:
            positions.append(np.arange(start, start + count))
            sequences.append(np.full(count, sequence))
    return np.concatenate(sequences), np.concatenate(positions)


class Placed:
    """A layout's indices on ``device``, for one rank."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self._layout, self._rank, self._device = layout, rank, device
        self._sent: dict[int, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}
        padded = layout.padded
        self.longest = max(padded)
        self.boundaries = self._send(np.asarray([0, *accumulate(padded)], dtype=np.int32))
        self._rows: torch.Tensor | None = None

    def take(self, values: torch.Tensor, shift: int) -> torch.Tensor:
        """This rank's rows [R, ...] of ``values`` [N, ...]; padding is 0."""
        sources_R, empty, _ = self._indices(shift)
        rows = values.index_select(0, sources_R)
        return rows if empty is None else rows.index_fill_(0, empty, 0)

    def positions(self, shift: int) -> torch.Tensor:
        """The position in its sequence of each row's token, int64 [R]; 0 where there is none."""
        return self._indices(shift)[2]

    def _indices(self, shift: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Sources [R], the rows that are padding if there are any, and positions [R]."""
        if shift not in self._sent:
            sources = self._layout.sources(self._rank, shift)
            _, positions = positions_of(self._layout, self._rank)
            empty = np.flatnonzero(sources == PADDING)
            positions = positions + shift
            sources[empty] = positions[empty] = 0
            self._sent[shift] = self._send(sources), self._send(empty) if empty.size else None, self._send(positions)
        return self._sent[shift]

    def put_back(self, rows: torch.Tensor) -> torch.Tensor:
        """The N tokens in order, [N, ...], from the rows of all ranks, one rank after another."""
        if self._rows is None:
            self._rows = self._send(self._layout.rows())
        return rows.index_select(0, self._rows)

    def _send(self, numbers: np.ndarray) -> torch.Tensor:
        return send(torch.from_numpy(numbers), self._device)


@lru_cache(maxsize=KEPT)
def place(layout: Layout, rank: int, device: torch.device) -> Placed:
    return Placed(layout, rank, device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to ``device`` behind what it has to do; the host goes on at once."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def lengths_of(nested: torch.Tensor) -> tuple[int, ...]:
    """Lengths of a jagged tensor's sequences.

    Read from the device only where nothing here has made the tensor.
    """
    offsets = nested.offsets()
    if offsets not in _known_lengths:
        _known_lengths[offsets] = tuple(offsets.diff().tolist())
    return _known_lengths[offsets]


def is_jagged(value: Any) -> bool:
    """Whether it is a nested tensor of sequences, one after another in its first dimension."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.jagged
        and value.lengths() is None
        and value._ragged_idx == 1  # type: ignore[attr-defined]
    )


def send_batch(batch: Any, device: torch.device) -> Any:
    """verl's micro-batch, a TensorDict, with its tensors on ``device`` and its lengths known."""
    sent = batch.copy().clear_device_()
    offsets: dict[tuple[int, ...], torch.Tensor] = {}  # one copy for all columns of these lengths
    for name in batch.keys():  # noqa: SIM118  a TensorDict is no mapping: iterating it goes over its rows
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


def jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """The nested tensor of ``values`` [N, ...], whose lengths are known from now on."""
    _known_lengths[offsets] = lengths
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def starts_of(lengths: Sequence[int]) -> np.ndarray:
    """Where each sequence begins among the tokens of all; int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - np.asarray(lengths)


class Rows:
    """Rows that are taken of each jagged tensor of a batch, in this order.

    Columns of the same lengths share an index.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self._indices: dict[tuple[torch.device, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]
        self._indices = {}

    def of(self, nested: torch.Tensor) -> torch.Tensor:
        key = nested.device, lengths_of(nested)
        if key not in self._indices:
            self._indices[key] = self._index(*key)
        tokens, offsets, kept = self._indices[key]
        return jagged(nested.values().index_select(0, tokens), offsets, kept)

    def _index(
        self, device: torch.device, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Which tokens they have, the offsets of their sequences, and the lengths."""
        kept = tuple(lengths[row] for row in self._rows)
        shifts = starts_of(lengths)[np.asarray(self._rows)] - starts_of(kept)
        tokens = np.repeat(shifts, kept) + np.arange(sum(kept))
        offsets = torch.tensor([0, *accumulate(kept)])
        return send(torch.from_numpy(tokens), device), send(offsets, device), kept


def _selected_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's selection of rows; jagged tensors are not taken apart and put together again."""

    @wraps(original)
    def index_select_tensor_dict(batch: Any, indices: torch.Tensor | list[int]) -> Any:
        if batch is None or not len(indices):
            return original(batch, indices)
        names = [name for name in batch.keys() if is_jagged(batch.get(name))]  # noqa: SIM118
        rows = Rows(indices if isinstance(indices, list) else indices.tolist())
        selected = original(batch.exclude(*names), indices)
        for name in names:
            selected.set(name, rows.of(batch.get(name)))
        return selected

    return index_select_tensor_dict


def _sent_ahead(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's forward step, given its micro-batch on the device already."""

    @wraps(original)
    def forward_step(self: Any, batch_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        from verl.utils.device import get_device_id, get_device_name

        index = get_device_id()
        device = index if isinstance(index, torch.device) else torch.device(get_device_name(), index)
        return original(self, iter([send_batch(next(batch_iter), device)]), *args, **kwargs)

    return forward_step


def _packed_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's packing of a jagged tensor for Megatron; unusual layouts are left to the original."""

    @wraps(original)
    def preprocess_thd_engine(
        input_ids: torch.Tensor,
        pre_process: bool = True,
        need_roll: bool = False,
        use_fp8_padding: bool = False,
        cp_layout: str = "zigzag",
        **unusual: Any,
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        if cp_layout != "zigzag" or any(value is not None for value in unusual.values()):
            return original(input_ids, pre_process, need_roll, use_fp8_padding, cp_layout=cp_layout, **unusual)
        from megatron.core import parallel_state
        from megatron.core.packed_seq_params import PackedSeqParams

        ranks = parallel_state.get_context_parallel_world_size()
        multiple = total = parallel_state.get_tensor_model_parallel_world_size() * (2 * ranks if ranks > 1 else 1)
        if use_fp8_padding:  # as verl has it for Transformer Engine's products
            multiple, total = lcm(16, multiple), 128 * multiple
        layout = Layout(lengths_of(input_ids), multiple, total, ranks)
        placed = place(layout, parallel_state.get_context_parallel_rank(), input_ids.device)
        bounds, longest = placed.boundaries, placed.longest
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        setattr(params, PLACED, placed)
        if not pre_process:
            return input_ids, params, None
        shift = int(need_roll)
        return placed.take(input_ids.values(), shift).unsqueeze(0), params, placed.positions(shift).unsqueeze(0)

    return preprocess_thd_engine


def _unpacked_by_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """The reverse of the above, for the output of the model's last stage."""

    @wraps(original)
    def postprocess_thd_engine(
        output: torch.Tensor,
        packed_seq_params: Any,
        input_ids: torch.Tensor,
        batch_size: int,
        post_process: bool = True,
        **rest: Any,
    ) -> torch.Tensor:
        placed: Placed | None = getattr(packed_seq_params, PLACED, None)
        if placed is None or not post_process:
            return original(output, packed_seq_params, input_ids, batch_size, post_process, **rest)
        from megatron.core import parallel_state

        rows = output[0]
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            of_ranks = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(of_ranks, rows.detach().contiguous(), group=group)
            of_ranks[torch.distributed.get_rank(group)] = rows  # the only one with a gradient
            rows = torch.cat(of_ranks)
        return jagged(placed.put_back(rows), input_ids.offsets(), lengths_of(input_ids))

    return postprocess_thd_engine


def _verl(target: str, replace: Callable[..., Any]) -> Patch:
    return Patch(
        target=f"verl.{target}",
        replace=replace,
        reason="packing reads lengths back from the device, which then waits for the host in every micro-batch",
        applies_to=requirement("verl"),
        remove_when="verl's Megatron engine packs a micro-batch from lengths that it has on the host",
    )


_ENGINE = "workers.engine.megatron.transformer_impl.MegatronEngineWith"
PACKING_PATCHES = (
    Patch(
        target="verl.utils.tensordict_utils.index_select_tensor_dict",
        replace=_selected_by_index,
        reason="it takes jagged tensors apart and puts them together for each micro-batch; the device has no work",
        applies_to=requirement("verl"),
        remove_when="verl selects the rows of a jagged tensor by one index",
    ),
    _verl(f"{_ENGINE}LMHead.forward_step", _sent_ahead),
    _verl(f"{_ENGINE}ValueHead.forward_step", _sent_ahead),
    _verl("models.mcore.model_forward.preprocess_thd_engine", _packed_by_index),
    _verl("models.mcore.model_forward.postprocess_thd_engine", _unpacked_by_index),
    _verl("models.mcore.model_forward_fused.preprocess_thd_engine", _packed_by_index),
    _verl("models.mcore.model_forward_fused.postprocess_thd_engine", _unpacked_by_index),
)
