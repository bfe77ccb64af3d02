"""Ends a run that hangs or has lost a process.

A collective that one rank never joins, or an engine that never answers, raises no error, and the
run would occupy its devices until somebody looks. The watchdog counts everything that the run
writes as progress, including the heartbeats of its processes within a step (run/heartbeat.py). It
writes the stacks of a hanging run to the run's logs.
"""

import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

import psutil

from retool_mcore.config import RlConfig, SftConfig
from retool_mcore.errors import EXIT_RETRYABLE, RunError
from retool_mcore.run import checkpoint, heartbeat
from retool_mcore.run.folder import remove_temporary

logger = logging.getLogger(__name__)

# Files and folders of the run:
WATCHED = (heartbeat.FILE, "start.jsonl", "metrics.jsonl", "trajectories", "checkpoints")
CHECKS_PER_STALL = 20  # checks for signs of life per train.stall_s
POLL_S = 2.0  # between two checks for a dead process
DUMP_S = 20.0  # timeout for the stacks of one process
STALLED = signal.SIGUSR2  # sent to this process, to interrupt its main thread
GRACE_S = 60.0  # time for the main thread to exit after a stall
LOST_GRACE_S = 10.0  # the same after a process died; short, because a wait for that process never ends
FREED_S = 3.0  # the same after this process's children were killed


class Watchdog:
    """Context manager that ends the run after ``train.stall_s`` seconds without a sign of life.

    Signs are stages of the start; sampled turns, finished trajectories, passes and updates; rows of
    metrics, records of trajectories and checkpoints. The time of a sign is when this process sees
    it, because the clocks of other nodes may differ. In SFT the first rank of each node has a
    watchdog, since no other node can end this node's ranks if the network fails. ``terminal``:
    where to print the error if the main thread is blocked in a library and handles no signal.
    Raises RunError on exit if the watchdog ended the run.
    """

    def __init__(self, config: SftConfig | RlConfig, terminal: IO[str], rank: int = 0) -> None:
        self._dir, self._stall_s = config.run.dir.absolute(), config.train.stall_s
        self._terminal, self._rank = terminal, rank
        self._ended = threading.Event()
        self._error: RunError | None = None
        self._checking = threading.Lock()  # locked during a check for dead processes
        self._find_dead: Callable[[], RunError | None] | None = None
        self._family: dict[int, psutil.Process] = {}  # all descendants seen so far, including orphans

    def __enter__(self) -> "Watchdog":
        signal.signal(STALLED, _leave)
        if self._stall_s:
            threading.Thread(target=self._look_for_signs, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        remove_shared_memory(self._family)
        if self._error is not None:
            raise self._error from error

    @contextmanager
    def polling(self, find_dead: Callable[[], RunError | None]) -> Generator[None]:
        """Poll ``find_dead`` within this context. An error that it returns ends the run."""
        self._find_dead = find_dead
        threading.Thread(target=self._poll, daemon=True).start()
        try:
            yield
        finally:
            self._find_dead = None
            if self._checking.acquire(timeout=LOST_GRACE_S):  # finish the check before the block's processes end
                self._checking.release()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            with self._checking:
                find_dead, error = self._find_dead, None
                if find_dead is None:
                    return
                try:
                    error = find_dead()
                except Exception as failure:  # noqa: BLE001  the next check finds the reason
                    logger.warning("could not check for dead processes of the run: %s", failure)
                self._family |= {process.pid: process for process in psutil.Process().children(recursive=True)}
            if error is not None:
                self._end(error, LOST_GRACE_S)
                return

    def _look_for_signs(self) -> None:
        seen, seen_s = modification_times(self._dir), time.monotonic()
        while not self._ended.wait(self._stall_s / CHECKS_PER_STALL):
            if (now := modification_times(self._dir)) != seen:
                seen, seen_s = now, time.monotonic()
            silent_s = time.monotonic() - seen_s
            if silent_s > self._stall_s:
                error = self._stalled(silent_s)
                self._end(error, GRACE_S)
                return

    def _stalled(self, silent_s: float) -> RunError:
        rank = f"-rank{self._rank}" if self._rank else ""
        stacks = self._dir / "logs" / f"stall-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}{rank}.txt"
        write_stacks(stacks)
        saved = checkpoint.complete_checkpoints(self._dir / "checkpoints")
        return RunError(
            f"no turn, pass, update, step, stage or checkpoint was finished for {silent_s:.0f} s, with train.stall_s = "
            f"{self._stall_s:g}. Stacks are in {stacks}, the output is in {self._dir / 'logs'}. "
            f"The same command resumes {f'after step {saved[-1].step}' if saved else 'from the beginning'}. If a turn, "
            "pass or update takes longer than that, raise train.stall_s; `retool plan` estimates these times."
        )

    def _end(self, error: RunError, grace_s: float) -> None:
        if self._ended.is_set() or self._error is not None:
            return
        self._error = error
        os.kill(os.getpid(), STALLED)  # _leave raises SystemExit in the main thread, which runs every ``finally``
        if self._ended.wait(grace_s):
            return
        for process in self._family.values():
            with suppress(psutil.Error):  # it has ended
                process.kill()
        if self._ended.wait(FREED_S):  # the main thread had waited for one of these, and prints the error itself
            return
        line = f"error: {f'rank {self._rank}: ' if self._rank else ''}{self._error}\n"
        os.write(self._terminal.fileno(), line.encode())
        remove_shared_memory(self._family)  # the main thread is blocked in code that handles no signals
        remove_temporary()
        os._exit(EXIT_RETRYABLE)


def remove_shared_memory(pids: Iterable[int], folder: Path = Path("/dev/shm")) -> None:
    """Remove shared-memory files that CUDA and loky left behind for processes that have ended."""
    gone = {pid for pid in pids if not psutil.pid_exists(pid)}
    files = [
        (path, path.name.split(".")[3], 16) for path in folder.glob("*.shm.*.*.*")
    ]  # the CUDA driver's, pid in hex
    files += [(path, path.name.split("-")[1], 10) for path in folder.glob("sem.loky-*-*")]
    for path, pid, base in files:
        with suppress(ValueError, OSError):
            if int(pid, base) in gone:
                path.unlink()


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def modification_times(run_dir: Path) -> dict[Path, int]:
    """Modification times of the run's files, in nanoseconds since 1970.

    Compare all of them: the newest alone would not change after a clock was set back.
    """
    times_ns: dict[Path, int] = {}
    for name in WATCHED:
        path = run_dir / name
        for file in (path, *(path.iterdir() if path.is_dir() else ())):
            try:
                times_ns[file] = file.stat().st_mtime_ns
            except FileNotFoundError:  # rotated away or not yet written
                continue
    return times_ns


def write_stacks(path: Path) -> None:
    """Write the state and the stack of each of the run's processes on this node.

    Without py-spy, writes only the stack of this process.
    """
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        if spy is None:
            file.write("py-spy is not installed, so other processes have only their state here.\n")
        for process in _processes():
            try:
                command = " ".join(process.cmdline())[:200]
                state = f"{process.status()}, {sum(process.cpu_times()[:2]):.1f} s of CPU"
            except psutil.Error:  # it has ended meanwhile
                continue
            file.write(f"\n== {process.pid} {command}\n{state}\n")
            file.flush()
            if process.pid == os.getpid():
                faulthandler.dump_traceback(file, all_threads=True)
            elif spy is not None:
                _spy(spy, process.pid, file)


def _spy(spy: str, pid: int, file: IO[str]) -> None:
    try:
        argv = [spy, "dump", "--pid", str(pid)]
        subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT, timeout=DUMP_S, check=False)
    except subprocess.TimeoutExpired:
        file.write(f"py-spy did not answer within {DUMP_S:.0f} s\n")


def _processes() -> list[psutil.Process]:
    """The run's processes on this node, including those of Ray and SGLang with other parents."""
    own = psutil.Process()
    first = own.parent() if "RANK" in os.environ else own  # the parent is torchrun; its children are the ranks
    family = [own, *(first or own).children(recursive=True)]
    processes = {process.pid: process for process in family}
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"], process.info["uids"]
        if words and uids and uids.real == os.getuid() and words[0].startswith(("ray::", "sglang::")):
            processes.setdefault(process.pid, process)
    return list(processes.values())
