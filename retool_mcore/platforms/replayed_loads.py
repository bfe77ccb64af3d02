"""A bucket of weights like one that an SGLang engine has loaded goes to the same places, at once.

SGLang finds the place of each matrix by its name and copies one after the other: 70 to 110 us each
in a model with experts, of which it has thousands. Weight sync after weight sync sends the same
buckets. So the first load of each is watched, and the next ones repeat its copies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import chain, pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement

LOADS = "_retool_loads"  # of a ModelRunner: what a bucket holds -> _Load
aten = torch.ops.aten


@dataclass(frozen=True)
class _Slice:
    """What was copied out of a bucket. It began ``start`` bytes behind the bucket's first."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, bucket_B: torch.Tensor) -> torch.Tensor:
        first = (bucket_B.storage_offset() + self.start) // self.dtype.itemsize
        empty: Any = torch.empty(0, dtype=self.dtype, device=bucket_B.device)
        return empty.set_(bucket_B.untyped_storage(), first, self.shape, self.stride)


@dataclass(frozen=True)
class _Copies:
    """Parts of a bucket and where each goes, alike in type and in order: one kernel's work."""

    parts: list[_Slice]
    into: list[torch.Tensor]

    def repeat(self, bucket_B: torch.Tensor) -> None:
        aten._foreach_copy_.default(self.into, [part.of(bucket_B) for part in self.parts])


@dataclass(frozen=True)
class _Fill:
    """Padding, as of a vocabulary. It is lost like the weights when an engine sleeps."""

    into: torch.Tensor
    value: float

    def repeat(self, bucket_B: torch.Tensor) -> None:
        del bucket_B
        self.into.fill_(self.value)


@dataclass(frozen=True)
class _Load:
    """What a model's own load of a bucket did, and where the model's tensors stood.

    ``steps`` is None where that was more than copies and padding: it may compute a scale.
    """

    places: list[Any]
    steps: list[_Copies | _Fill] | None


class _Watched(TorchDispatchMode):
    """Notes what is copied from a bucket into a model, and whether anything else was done."""

    def __init__(self, bucket_B: torch.Tensor, model: torch.nn.Module) -> None:
        super().__init__()
        self._bucket_B, self._memory = bucket_B, bucket_B.untyped_storage().data_ptr()
        self._model = {each.untyped_storage().data_ptr() for each in _tensors(model)}
        self._noted: list[tuple[_Slice | float, torch.Tensor]] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._note(func, *args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, into: Any = None, source: Any = 0, *_: Any) -> None:
        what = None
        if func is aten.copy_.default and source.untyped_storage().data_ptr() == self._memory:
            start = source.data_ptr() - self._bucket_B.data_ptr()
            what = _Slice(source.dtype, start, tuple(source.shape), source.stride())
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            what = float(source)
        if what is None or into.untyped_storage().data_ptr() not in self._model:
            self._noted = None
        elif self._noted is not None:
            self._noted.append((what, into.detach()))

    def steps(self) -> list[_Copies | _Fill] | None:
        """Copies between two fills are done in any order, so none if one lies over another."""
        steps: list[_Copies | _Fill] = []
        alike: dict[Any, _Copies] = {}  # since the last fill
        for what, into in self._noted or ():
            if not isinstance(what, _Slice):
                steps.append(_Fill(into, what))
                alike.clear()
                continue
            kind = what.dtype, into.dtype, what.stride == into.stride()
            if kind not in alike:
                alike[kind] = _Copies([], [])
                steps.append(alike[kind])
            alike[kind].parts.append(what)
            alike[kind].into.append(into)
        return None if self._noted is None or _overlap(steps) else steps


def _overlap(steps: list[_Copies | _Fill]) -> bool:
    """Whether, of copies without a fill between them, one begins before another's last element."""
    spans = list[tuple[int, int]]()
    for step in steps:
        if isinstance(step, _Fill):
            spans.clear()
            continue
        for tensor in step.into:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize))
        if any(end > start for (_, end), (start, _) in pairwise(sorted(spans))):
            return True
    return False


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _places(model: torch.nn.Module) -> list[Any]:
    return [(each.data_ptr(), each.shape) for each in _tensors(model)]


def by_the_same_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat the load of a bucket with the same names, shapes, types and order.

    Only where copies and padding were all that it did, and where the model's tensors stand as they
    stood. Else the original loads.
    """

    @wraps(original)
    def update_weights(self: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> Any:
        if self.server_args.enable_eplb:  # it moves experts between ranks
            return original(self, flattened_tensor_bucket_dict)
        bucket_B, metadata = (flattened_tensor_bucket_dict[name] for name in ("flattened_tensor", "metadata"))
        loads: dict[Any, _Load] = self.__dict__.setdefault(LOADS, {})
        held = tuple((each.name, tuple(each.shape), each.dtype, each.start_idx) for each in metadata)
        known = loads.get(held)
        if known is None or known.places != _places(self.model):
            with _Watched(bucket_B, self.model) as watched:
                answer = original(self, flattened_tensor_bucket_dict)
            loads[held] = _Load(_places(self.model), watched.steps())
            return answer
        if known.steps is None:
            return original(self, flattened_tensor_bucket_dict)
        for step in known.steps:
            step.repeat(bucket_B)
        return True, "Success"

    return update_weights


REPLAY_PATCH = Patch(
    target="sglang.srt.model_executor.model_runner.ModelRunner._update_weights_from_flattened_bucket",
    replace=by_the_same_copies,
    reason="each matrix's name is compared with those of all experts, and each is copied by itself, at each sync",
    applies_to=requirement("sglang"),
    remove_when="SGLang remembers where a bucket's matrices go",
)
