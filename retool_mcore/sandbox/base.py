"""The interface that all sandboxes share: ``Sandbox``, ``ExecRequest`` and ``ExecResult``.

A failure of the executed code is always an ``ExecResult``. A failure of the sandbox itself is
always ``SandboxUnavailable``. An invalid request (a path that leaves the working directory, a limit
that is not a positive number) is the caller's mistake: it raises ``ConfigError`` before anything
runs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from types import TracebackType
from typing import Literal, Self, cast

from retool_mcore.errors import ConfigError

MAX_RUN_TIMEOUT_S = 600.0
MIN_MEMORY_LIMIT_MB = 16
MAX_MEMORY_LIMIT_MB = 65_536
MAX_FILES = 256
MAX_FILE_BYTES = 32 << 20

Status = Literal["finished", "time_limit", "memory_limit"]


class Level(StrEnum):
    """Isolation levels, weakest first.

    A server that does not report its level counts as ``none``; the local sandbox never runs at
    ``none``.
    """

    NONE = "none"
    RLIMITS = "rlimits"
    LANDLOCK = "landlock"
    NAMESPACES = "namespaces"

    @property
    def rank(self) -> int:
        """Position in the order of strength; 0 is the weakest."""
        return list(Level).index(self)


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """Result of one execution of model code.

    ``return_code``: exit code, -N if signal N killed the code (-11: segfault), None if the sandbox
    stopped it at a limit.
    ``stdout``, ``stderr``: long output keeps its head and tail, joined by a line with the number of
    bytes dropped; bytes that are not UTF-8 are escaped.
    ``run_s``: wall time in seconds since the code started; ``queue_s``: wait before that.
    ``cpu_s``: user plus system time in seconds (0.0 if the server does not report it).
    ``files``: contents of the ``fetch_files`` that existed at the end, by name.
    ``session_started``: this was the first cell in the session's interpreter.
    ``session_restarted``: the session's earlier definitions are gone.
    """

    status: Status
    return_code: int | None
    stdout: str
    stderr: str
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    run_s: float = 0.0
    queue_s: float = 0.0
    cpu_s: float = 0.0
    level: str = Level.NONE
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    session_restarted: bool = False
    session_started: bool = False

    @property
    def ok(self) -> bool:
        """Whether the code finished with exit code 0."""
        return self.status == "finished" and self.return_code == 0

    @property
    def text(self) -> str:
        """Text shown to the model: stdout, stderr or traceback, then a note on an abnormal end."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), self._ending()]
        return "\n".join(part for part in parts if part)

    def _ending(self) -> str:
        notes: list[str] = []
        if self.session_restarted:
            notes.append("[the interpreter was restarted before this code: earlier definitions are gone]")
        if self.status == "time_limit":
            notes.append(f"[stopped at the time limit, after {self.run_s:.1f} s]")
        elif self.status == "memory_limit":
            notes.append("[stopped at the memory limit]")
        elif self.return_code is not None and self.return_code < 0:
            notes.append(f"[killed by signal {-self.return_code}]")
        elif self.return_code and not self.stderr:
            notes.append(f"[exit code {self.return_code}]")
        return "\n".join(notes)


@dataclass(frozen=True, kw_only=True)
class ExecRequest:
    """A validated request to execute code.

    With ``notebook``, the code runs as a notebook cell, which echoes the value of a trailing
    expression. Without it, the code runs as a plain script, as SandboxFusion's clients expect.

    Limits above the maximum (600 s, 65536 MB) are lowered to it, and memory limits below 16 MB are
    raised to 16 MB. Raises ConfigError, naming the value and the rule, for zero, negative or
    non-finite limits and for other invalid fields.
    """

    code: str
    stdin: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    run_timeout_s: float = 10.0
    memory_limit_mb: int = 1024
    fetch_files: Sequence[str] = ()
    session: str | None = None
    notebook: bool = True

    def __post_init__(self) -> None:
        code = cast("object", self.code)  # unchecked input of a model or a client
        if not isinstance(code, str):
            raise ConfigError(f"code is a {type(code).__name__}, not a string. Pass Python source as str.")
        if not (math.isfinite(self.run_timeout_s) and self.run_timeout_s > 0):
            raise ConfigError(f"run_timeout_s = {self.run_timeout_s} is not a positive number of seconds.")
        if self.memory_limit_mb <= 0:
            raise ConfigError(f"memory_limit_mb = {self.memory_limit_mb} is not a positive number of MB.")
        if len(self.files) > MAX_FILES or len(self.fetch_files) > MAX_FILES:
            raise ConfigError(
                f"files has {len(self.files)} entries and fetch_files has {len(self.fetch_files)}. Use at most "
                f"{MAX_FILES} of each per execution."
            )
        size_bytes = sum(len(content) for content in self.files.values())
        if size_bytes > MAX_FILE_BYTES:
            raise ConfigError(f"files contain {size_bytes} bytes. Use at most {MAX_FILE_BYTES} per execution.")
        for name in (*self.files, *self.fetch_files):
            check_relative_path(name)
        memory_mb = max(MIN_MEMORY_LIMIT_MB, min(self.memory_limit_mb, MAX_MEMORY_LIMIT_MB))
        object.__setattr__(self, "run_timeout_s", min(self.run_timeout_s, MAX_RUN_TIMEOUT_S))
        object.__setattr__(self, "memory_limit_mb", memory_mb)


class Sandbox(ABC):
    """Runs untrusted Python.

    Hundreds of calls may be in flight. A bounded number of them execute at a time, first come,
    first served.
    """

    async def execute(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        run_timeout_s: float = 10.0,
        memory_limit_mb: int = 1024,
        fetch_files: Sequence[str] = (),
        session: str | None = None,
        notebook: bool = True,
    ) -> ExecResult:
        """Run ``code`` as a notebook cell (echoes the value of a trailing expression) or a script.

        ``run_timeout_s`` is wall time from the start of execution, not from the call. The sandbox
        writes ``files`` into the working directory first and reads ``fetch_files`` from it at the
        end. Calls with the same ``session`` share definitions, if the sandbox was opened with
        sessions.

        Raises ConfigError for an invalid request, and SandboxUnavailable when the sandbox itself
        fails (a client of servers retries first). Never raises for anything the code does.
        """
        request = ExecRequest(
            code=code,
            stdin=stdin,
            files=dict(files or {}),
            run_timeout_s=run_timeout_s,
            memory_limit_mb=memory_limit_mb,
            fetch_files=tuple(fetch_files),
            session=session,
            notebook=notebook,
        )
        return await self.run(request)

    @abstractmethod
    async def run(self, request: ExecRequest) -> ExecResult:
        """Execute a validated request. Raises as ``execute`` does."""

    @abstractmethod
    async def end_session(self, session: str) -> None:
        """Discard a session and its definitions. Unknown names are ignored."""

    @abstractmethod
    async def open(self) -> None:
        """Start the local processes, or contact the servers. Otherwise the first request does so.

        Raises SandboxUnavailable or ConfigError when ``min_level`` cannot be met.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill all executions and clean up. Calls in flight raise SandboxUnavailable."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def check_relative_path(name: str) -> None:
    """Raise ConfigError unless ``name`` stays inside the execution's working directory."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts or len(name) > 1024:
        raise ConfigError(
            f"file path {name!r} does not stay inside the working directory of the execution. "
            "Use a relative path without '..'."
        )
