"""A local SGLang server for as long as a ``with`` block lasts."""

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
from retool_mcore.platforms.network import LATER_PORTS, engine_key
from retool_mcore.process import die_with_parent

START_TIMEOUT_S = 600.0  # a 32B model from a cold disk takes minutes, a tiny one on two cores half a minute
STOP_TIMEOUT_S = 10.0


class SglangServer:
    """Runs the SGLang server of a model directory on a free port of 127.0.0.1.

    Entering the block starts it and waits until it answers; leaving the block ends all its
    processes. The server refuses requests without its ``key``: SGLang unpickles what some paths are
    sent, so whoever may post there runs code as the user. ``log_path`` takes its output. ``port``:
    a fixed port, for a server that replaces another. ``engine_args``: arguments of SGLang's
    ServerArgs, by their names; ``extra_args``: further options of ``sglang.launch_server``.
    ``devices``: the only devices that the server sees, by their numbers on this machine; empty: all
    of them. ``env``: more of its environment.
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
        start_timeout_s: float = START_TIMEOUT_S,
        port: int | None = None,
    ) -> None:
        self.model_path = str(model_path)
        self.platform = platform
        self.dtype, self.max_running_requests, self.tp = dtype, max_running_requests, tp
        self.engine_args, self.devices, self.env = engine_args, devices, env or {}
        self.log_path = log_path
        self.extra_args = list(extra_args)
        self.start_timeout_s = start_timeout_s
        self.port = port or free_port()
        self.key = engine_key() or secrets.token_hex(32)
        self._key_file: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's address with its key as the password, as ``SglangEngine`` takes it."""
        return f"http://:{self.key}@127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is also the number of its process group."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_healthy()
        return self

    def start(self) -> None:
        """Start the process. In any case, leave the ``with`` block or call ``stop()`` later."""
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
        shared_out = self.platform.only_devices(self.devices) if self.devices else {}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "wb", opener=_private) as log:  # SGLang writes its arguments there
            self._process = subprocess.Popen(
                [*command, "--config", self._key_file.name, *self.extra_args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.platform.process_env(), **shared_out, **self.env},
                start_new_session=True,  # its own process group: ended as a whole, and not by our Ctrl-C
                # Not SIGTERM: SGLang would wait for requests whose answers nobody reads.
                preexec_fn=die_with_parent,  # noqa: PLW1509  system calls only, no lock is taken in the child
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_healthy(self) -> None:
        """Return when the server answers.

        If it does not, stop it and raise RolloutError with the last lines of its log.
        """
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        assert self._process is not None, "the server was not started"
        deadline = time.monotonic() + self.start_timeout_s
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                status = self._process.poll()
                if status is not None:
                    raise RolloutError(
                        f"the SGLang server of {self.model_path} ended with status {status} before it was ready. "
                        f"Its last words, in full in {self.log_path}:\n{self._last_words()}"
                    )
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").is_success:
                        return
                time.sleep(0.2)
        raise RolloutError(
            f"the SGLang server of {self.model_path} did not answer within {self.start_timeout_s:g} s. "
            f"Its last words, in full in {self.log_path}:\n{self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def stop(self) -> None:
        """End the server and all its processes. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        self._key_file.close()
        # The scheduler and the detokenizer are children in the same group. SIGTERM lets them free
        # shared memory.
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A TCP port nobody listens on, below the range from which the kernel gives ports to clients.

    The server binds it only after half a minute; until then another process would sometimes take a
    port of the kernel's range.
    """
    while True:
        port = random.randrange(*LATER_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _private(path: str, flags: int) -> int:
    """Open a file that no other user can read, whatever its mode was."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
