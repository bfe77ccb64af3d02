"""Patches of torch: where its store listens, and what reading a checkpoint may call.

Imports no torch, because `import verl` loads this file in every process of a run.
"""

import ipaddress
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import IO, Any

from retool_mcore.platforms.patches import Change, ModuleView, Patch, requirement

_CHECKPOINT = "torch.distributed.checkpoint."
INDEX_NAMES = {  # what torch and Megatron write into a checkpoint's index
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


def _listen_on_host(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(
        self: Any, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *more: Any,
        **named: Any,
    ) -> None:  # fmt: skip
        if is_master and (listener := _listener(host_name, port)):
            port = listener.getsockname()[1]
            named["master_listen_fd"] = listener.detach()  # the store closes it
        original(self, host_name, port, world_size, is_master, *more, **named)

    return __init__


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens on ``host``; None where the store opens its own.

    A name may lead other machines elsewhere than this one: Debian's hosts call themselves
    127.0.1.1. The port is taken where this process has the store already, which torch then shares.
    """
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    except (OSError, ValueError):
        return None


STORE_PATCH = Patch(
    changes=(Change("torch.distributed.TCPStore.__init__", None, _listen_on_host),),
    reason="torch's store listens on every interface, whatever its host_name is",
    gain="Security: other machines cannot reach the stores of verl's workers, SGLang's schedulers and torchrun",
    applies_to=requirement("torch"),
    remove_when="torch.distributed.TCPStore listens on its host_name",
)


@contextmanager
def files_are_data() -> Iterator[None]:
    """Within the block torch.load calls nothing, also where its caller says weights_only=False.

    verl and torch's distributed checkpoints say so. Not for a whole process: verl's processes send
    each other batches through torch.load.
    """
    os.environ[FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[FORCED]


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint. Raises UnpicklingError for any other name."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in INDEX_NAMES or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"its index names {module}.{name}, which no checkpoint does: reading it would run code. "
            "Load checkpoints of people you trust."
        )


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _refuse_unknown_names(module: Any) -> ModuleView:
    def load(file: IO[bytes]) -> Any:
        return IndexUnpickler(file).load()

    return ModuleView(module, load=load)


INDEX_PATCH = Patch(
    changes=(Change(f"{_CHECKPOINT}filesystem.pickle", None, _refuse_unknown_names),),
    reason="the index of a distributed checkpoint is a pickle, and torch lets it call any function",
    gain="Security: loading somebody else's checkpoint runs no code",
    applies_to=requirement("torch"),
    remove_when="torch's FileSystemReader reads an index with weights_only, or as JSON",
)
