"""The processes of an SGLang server, started before the server has its settings.

SGLang starts a scheduler for each device and a detokenizer. Each is a new interpreter that imports
SGLang once more: some 25 of the 45 s of an engine's start on an H100 node. A process that waits
here has that behind it. It gets function, arguments and environment when SGLang starts its own.

It takes a new one's place only where the two would have begun alike: see ``_beginning``. Otherwise
SGLang gets the new one that it asks for.
"""

import atexit
import importlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import setproctitle

from retool_mcore.process import die_with_parent

logger = logging.getLogger(__name__)

IMPORTED = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")
READ_AT_BEGINNING = ("CUDA_", "LD_", "PYTHON")  # by interpreter, loader and driver; all else is read by SGLang's code
SET_AT_LAUNCH = {  # by verl's _set_envs_and_config, before SGLang starts its processes
    "CUDA_DEVICE_MAX_CONNECTIONS": "4",
    "CUDA_MODULE_LOADING": "AUTO",
    "PYTHONFAULTHANDLER": "1",
}


@dataclass
class Waiting:
    process: BaseProcess
    calls: Connection  # closed when it is not needed, upon which the process ends
    beginning: tuple[Any, ...]


_waiting: list[Waiting] = []


def start(
    devices: Mapping[str, str],
    schedulers: int,
    *,
    memory_saver: bool,
    ahead: Callable[[], None] | None = None,
    imported: Sequence[str] = IMPORTED,
) -> None:
    """Start the processes of one server, in a thread that lives as long as they do.

    ``devices``: the variable that names those of the server. ``memory_saver``: whether SGLang
    preloads its allocator into the schedulers. ``ahead``: what one more process does meanwhile.
    """
    from sglang.srt.entrypoints import engine
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from retool_mcore.platforms.patches import ModuleView

    engine.mp = ModuleView(multiprocessing, Process=Launched)  # what this one file sees
    atexit.register(release)  # before multiprocessing's own, which waits for all of them
    with _environment({**SET_AT_LAUNCH, **devices}), ExitStack() as preloaded:
        if ahead is not None:
            multiprocessing.get_context("spawn").Process(target=_do, args=(ahead,), daemon=True).start()
        _start_one(imported)  # the detokenizer
        preloaded.enter_context(TorchMemorySaverAdapter.create(enable=memory_saver).configure_subprocess())
        for _ in range(schedulers):
            _start_one(imported)


def release() -> None:
    """End those that still wait."""
    for each in _waiting:
        each.calls.close()
    _waiting.clear()


class Launched:
    """In place of ``multiprocessing.Process`` where SGLang starts its processes."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self._call = (target, args, kwargs or {})
        self._process: BaseProcess | None = None

    def start(self) -> None:
        target, args, kwargs = self._call
        if (fitting := _take()) is None:
            self._process = multiprocessing.Process(target=target, args=args, kwargs=kwargs)
            self._process.start()
            return
        self._process = fitting.process
        fitting.calls.send((dict(os.environ), target, args, kwargs))
        fitting.calls.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def _do(ahead: Callable[[], None]) -> None:
    die_with_parent()
    ahead()


def _start_one(imported: Sequence[str]) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_wait, args=(theirs, imported))
    process.start()
    theirs.close()
    _waiting.append(Waiting(process, ours, _beginning()))


def _wait(calls: Connection, imported: Sequence[str]) -> None:
    for module in imported:
        importlib.import_module(module)
    setproctitle.getproctitle()  # looks for the title's place by the environment as it began
    try:
        environment, target, args, kwargs = calls.recv()
    except EOFError:  # the server needs no more, or has died
        return
    calls.close()
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


def _take() -> Waiting | None:
    """One that began as a process would that is started now."""
    for each in _waiting:
        if each.beginning == _beginning() and each.process.is_alive():
            _waiting.remove(each)
            return each
    if _waiting:
        logger.warning("SGLang's process starts anew: it begins with %s, not %s", _beginning(), _waiting[0].beginning)
    return None


def _beginning() -> tuple[Any, ...]:
    """What a process that has begun cannot change: its program, and variables that it has read.

    SGLang binds a process to a NUMA node by another program.
    """
    read = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_BEGINNING)}
    return spawn.get_executable(), read


@contextmanager
def _environment(changed: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
