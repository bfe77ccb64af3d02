"""SandboxFusion's HTTP messages, as used by our server and our client.

The field names are SandboxFusion's. We add the field `retool` for results that SandboxFusion's
fields cannot express; its clients ignore that field.
"""

from __future__ import annotations

import base64
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Status

LEVEL_HEADER = "x-sandbox-level"
SESSIONS_HEADER = "x-sandbox-sessions"
DEFAULT_MEMORY_LIMIT_MB = 1024
TOKEN_VARIABLE = "RETOOL_SANDBOX_TOKEN"
_MIN_TOKEN_CHARS = 16


def read_token(path: Path | None) -> str | None:
    """Read the token from ``path``, or else from RETOOL_SANDBOX_TOKEN; None if neither is set.

    Raises ConfigError for an unreadable file and for a token shorter than 16 characters, with a
    space, or with characters other than printable ASCII.
    """
    where, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
    if path is not None:
        try:
            where, token = str(path), path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the sandbox token cannot be read from {path}: {getattr(error, 'strerror', error)}"
            ) from error
    if token is None:
        return None
    if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the sandbox token in {where} has {len(token)} characters. It must have {_MIN_TOKEN_CHARS} or more "
            "printable ASCII characters and no space. Create one with `openssl rand -hex 32`."
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server listening on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _decode(content: Any) -> Any:
    return base64.b64decode(content, validate=True) if isinstance(content, str) else content


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


# Content of a file: bytes, base64 in JSON.
_Content = Annotated[bytes, BeforeValidator(_decode), PlainSerializer(_encode, when_used="json")]


class RunCodeRequest(BaseModel):
    """Body of POST /run_code. ``notebook`` and ``session`` are our additions.

    ``memory_limit_MB`` of -1, SandboxFusion's "no limit", means our default limit (1024 MB).
    Without ``notebook``, the code runs as a plain script, as in SandboxFusion, so that a grader can
    compare its standard output.
    """

    code: str
    language: Literal["python"]
    run_timeout: float = 10.0
    compile_timeout: float = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, _Content | None] = Field(default_factory=dict[str, bytes | None])
    fetch_files: list[str] = Field(default_factory=list[str])
    session: str | None = Field(default=None, max_length=256)
    notebook: bool = False

    @classmethod
    def from_request(cls, request: ExecRequest) -> RunCodeRequest:
        """Build the message for a validated ``request``."""
        return cls.model_construct(
            code=request.code,
            language="python",
            run_timeout=request.run_timeout_s,
            memory_limit_MB=request.memory_limit_mb,
            stdin=request.stdin,
            files=dict(request.files),
            fetch_files=list(request.fetch_files),
            session=request.session,
            notebook=request.notebook,
        )

    def to_request(self) -> ExecRequest:
        """Convert to a validated ``ExecRequest``. Raises ConfigError."""
        return ExecRequest(
            code=self.code,
            stdin=self.stdin,
            # SandboxFusion's clients send null for an absent file.
            files={name: content for name, content in self.files.items() if content is not None},
            run_timeout_s=self.run_timeout,
            memory_limit_mb=DEFAULT_MEMORY_LIMIT_MB if self.memory_limit_MB == -1 else self.memory_limit_MB,
            fetch_files=tuple(self.fetch_files),
            session=self.session,
            notebook=self.notebook,
        )


class CommandRunResult(BaseModel):
    """SandboxFusion's result of one process."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class Extras(BaseModel):
    """Fields of ``ExecResult`` that SandboxFusion's response lacks."""

    model_config = ConfigDict(from_attributes=True)

    status: Status
    level: Level
    queue_s: float
    cpu_s: float
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int
    session_restarted: bool
    session_started: bool


class RunCodeResponse(BaseModel):
    """Response to POST /run_code."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, _Content] = Field(default_factory=dict[str, bytes])
    retool: Extras | None = None

    @classmethod
    def from_result(cls, result: ExecResult) -> RunCodeResponse:
        """Convert to SandboxFusion's form, which reports a memory limit as return code -9."""
        killed = result.status == "memory_limit"
        return cls(
            status="Success" if result.ok else "Failed",
            message="stopped at the memory limit" if killed else "",
            run_result=CommandRunResult(
                status="TimeLimitExceeded" if result.status == "time_limit" else "Finished",
                execution_time=result.run_s,
                return_code=-9 if killed else result.return_code,
                stdout=result.stdout,
                stderr=result.stderr,
            ),
            files=dict(result.files),
            retool=Extras.model_validate(result),
        )

    def to_result(self, *, round_trip_s: float) -> ExecResult:
        """Convert to an ``ExecResult``. Raises ValueError when the response contains no result.

        ``round_trip_s`` replaces the execution time, in seconds, that a server did not report.
        """
        run = self.run_result or self.compile_result
        if run is None:
            raise ValueError(f"status {self.status!r} without a run_result")
        run_s = run.execution_time if run.execution_time is not None else round_trip_s
        status = "time_limit" if run.status == "TimeLimitExceeded" else "finished"
        extras: dict[str, Any] = {"status": status, "queue_s": max(0.0, round_trip_s - run_s)}
        if self.retool is not None:
            extras = self.retool.model_dump()
        return ExecResult(
            return_code=run.return_code if extras["status"] == "finished" else None,
            stdout=run.stdout or "",
            stderr=run.stderr or "",
            run_s=run_s,
            files=self.files,
            **extras,
        )
