"""A checkpoint's files are data: none of them can name a function to call when it is read.

torch reads its own files so by default (``weights_only``). But verl and torch's distributed
checkpoints ask it not to, and the index of such a checkpoint is a plain pickle.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from retool_mcore.platforms.patches import ModuleView, Patch
from retool_mcore.platforms.versions import requirement

_CHECKPOINT = "torch.distributed.checkpoint."
NAMES = {  # what torch and Megatron write into an index
    *(
        (f"{_CHECKPOINT}metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((f"{_CHECKPOINT}planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    (f"{_CHECKPOINT}filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's own


@contextmanager
def files_are_data() -> Iterator[None]:
    """Within the block torch.load calls nothing, also where its caller says weights_only=False.

    Not for a whole process: verl's processes send each other batches through torch.load.
    """
    os.environ[FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[FORCED]


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint. Raises UnpicklingError for any other name."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in NAMES or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"its index names {module}.{name}, which no checkpoint does: reading it would run code. "
            "Load checkpoints of people you trust."
        )


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _with_known_names(module: Any) -> ModuleView:
    def load(file: IO[bytes]) -> Any:
        return IndexUnpickler(file).load()

    return ModuleView(module, load=load)


INDEX_PATCH = Patch(
    target=f"{_CHECKPOINT}filesystem.pickle",
    replace=_with_known_names,
    reason="the index of a distributed checkpoint is a pickle that may run any code",
    applies_to=requirement("torch"),
    remove_when="torch's FileSystemReader reads an index with weights_only, or as JSON",
)
