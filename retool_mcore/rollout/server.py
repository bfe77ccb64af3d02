"""A context manager that runs a local SGLang server."""

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from retool_mcore.errors import RolloutError
from retool_mcore.platforms.base import Platform
from retool_mcore.platforms.network import LISTEN_PORTS, engine_key
from retool_mcore.process import die_with_parent

START_TIMEOUT_S = 600.0  # a 32B model takes minutes from a cold disk, a tiny one half a minute on two cores
STOP_TIMEOUT_S = 1.0


class SglangServer:
    """Runs an SGLang server for a model directory on a free port of 127.0.0.1.

    Entering the ``with`` block starts the server and waits until it is healthy. Leaving the block
    kills all its processes. The server rejects requests without its API ``key``: some endpoints
    unpickle request data, so anyone who can post to them could run code as this user.

    ``log_path``: file for the server's output.
    ``port``: a fixed port, for a server that replaces another.
    ``engine_args``: SGLang ServerArgs by name.
    ``extra_args``: more command-line options of ``sglang.launch_server``.
    ``devices``: indices of the devices visible to the server; empty for all.
    ``env``: additional environment variables.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        platform: Platform,
        *,
        dtype: str,
        log_path: Path,
        max_running_requests: int,
        tp: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        devices: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        self.model_path = str(model_path)
        self.platform = platform
        self.dtype, self.max_running_requests, self.tp = dtype, max_running_requests, tp
        self.engine_args, self.devices, self.env = engine_args, devices, env or {}
        self.log_path = log_path
        self.extra_args = list(extra_args)
        self.port = port or free_port()
        self.key = engine_key() or secrets.token_hex(32)
        self._key_file: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's URL for ``SglangEngine``, with the API key as its password."""
        return f"http://:{self.key}@127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group id."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_healthy()
        return self

    def start(self) -> None:
        """Start the process without waiting. The caller must call ``stop()``, even on errors."""
        command = self.platform.sglang_command(
            self.model_path,
            self.port,
            dtype=self.dtype,
            max_running_requests=self.max_running_requests,
            tp=self.tp,
            engine_args=self.engine_args,
        )
        # Other users can read a command's arguments, but not this file.
        self._key_file = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115  closed in stop()
        self._key_file.write(f'api-key: "{self.key}"\n')
        self._key_file.flush()
        device_env = self.platform.only_devices(self.devices) if self.devices else {}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "wb", opener=_private) as log:  # private: SGLang logs its arguments
            self._process = subprocess.Popen(
                [*command, "--config", self._key_file.name, *self.extra_args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.platform.process_env(), **device_env, **self.env},
                start_new_session=True,  # a separate process group: killable as a whole, unaffected by Ctrl-C
                # Not SIGTERM: SGLang would first finish requests whose responses nobody reads.
                preexec_fn=die_with_parent,  # noqa: PLW1509  system calls only, no lock is taken in the child
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_healthy(self) -> None:
        """Wait until the server is healthy.

        On failure, stops the server and raises RolloutError with the last lines of its log.
        """
        try:
            problem = self._wait()
        except BaseException:
            self.stop()
            raise
        if problem:
            self.stop()
            log = f"The end of its log {self.log_path}:\n{self._log_tail()}"
            raise RolloutError(f"the SGLang server of {self.model_path} {problem}. {log}")

    def _wait(self) -> str:
        """Wait until the server is healthy and return "", or why it is not."""
        assert self._process is not None, "the server was not started"
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if (status := self._process.poll()) is not None:
                    return f"exited with status {status} before it was ready"
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").is_success:
                        return ""
                time.sleep(0.2)
        return f"did not answer within {START_TIMEOUT_S:g} s"

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def stop(self) -> None:
        """Stop the server and all its processes. Does nothing if it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        self._key_file.close()
        # SIGTERM ends its children, except the resource tracker. After SIGTERM alone, the server
        # itself would wait 5 s to diagnose why they ended.
        _signal_group(process.pid, signal.SIGTERM)
        process.kill()
        process.wait()
        # The resource tracker now frees what the others shared, and exits.
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while _signal_group(process.pid, 0) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        _signal_group(process.pid, signal.SIGKILL)


def free_port() -> int:
    """A free TCP port below the kernel's ephemeral port range.

    The server binds the port only after half a minute. Until then, the kernel may give an
    ephemeral port to another process.
    """
    while True:
        port = random.randrange(*LISTEN_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _private(path: str, flags: int) -> int:
    """Opener that makes the file readable by its owner only, even if it already exists."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group, or only look for it with 0. Returns whether it exists."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True
