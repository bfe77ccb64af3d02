"""The first signal asks a process to end; the second, or the end of its grace period, ends it.

A lost terminal is such a signal, too.
"""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import typer

from retool_mcore import process as process_module
from retool_mcore.cli.common import guarded
from retool_mcore.process import standard_exit_code

# A process as a run has them: its main thread may wait in a call that no Python code interrupts.
WAITS = """
import ctypes, os, sys, time
from retool_mcore.run.signals import EndedBySignal, StopSignals, exit_code
try:
    with StopSignals(float(sys.argv[2]), lambda number: os._exit(exit_code(number))) as ending:
        print("up", flush=True)
        if sys.argv[1] == "in C":
            forever = ctypes.create_string_buffer(64)  # a mutex, locked twice
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(forever)
        while not ending.first_signal:
            time.sleep(0.02)
    raise EndedBySignal(ending.first_signal, "saved")
except EndedBySignal as ended:
    print(ended.message, flush=True)
    raise
finally:
    print("cleaned up", flush=True)
"""


@contextmanager
def process(how: str, grace_s: float, shell: str = 'exec "$@"') -> Iterator[subprocess.Popen[str]]:
    argv = ["sh", "-c", shell, "sh", sys.executable, "-c", WAITS, how, str(grace_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGUSR1, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=lambda x: str(int(x)),
)
def test_one_signal_lets_it_save(number: signal.Signals, code: int):
    with process("heeds", 900) as child:
        child.send_signal(number)
        out, stderr = child.communicate(timeout=300)
        assert (child.returncode, out) == (code, f"note: ended by {number.name}: saved\ncleaned up\n"), stderr


def test_a_second_signal_ends_it_at_once_whatever_it_waits_for():
    with process("in C", 900) as child:
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)  # Linux keeps one of two that come at once
        child.send_signal(signal.SIGTERM)  # of the same key, by who started it
        time.sleep(1.0)
        assert child.poll() is None, "what comes together is one signal"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=5) == 130
        assert child.communicate()[0] == ""


def test_it_ends_when_its_grace_does():
    with process("in C", 0) as none, process("in C", 2) as some, process("in C", 600) as long:
        sent_s = time.monotonic()
        for child in (long, some, none):
            child.send_signal(signal.SIGTERM)
        assert none.wait(timeout=300) == 143
        assert some.poll() is None, "its two seconds are not over"
        assert some.wait(timeout=300) == 143 and time.monotonic() - sent_s >= 1.9
        assert long.poll() is None


def test_what_was_ignored_stays_ignored():
    """A shell gives "ignore SIGINT" to its background processes."""
    with process("heeds", 900, shell="trap '' INT; exec \"$@\"") as child:
        child.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert child.poll() is None


def test_an_end_while_ray_starts_is_one_note(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(process_module, "_exit_signals", [])
    monkeypatch.delenv("RANK", raising=False)

    @guarded
    def command() -> None:
        with standard_exit_code():
            raise SystemExit(signal.SIGTERM.value)

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 143
    assert capfd.readouterr().err == "note: ended by SIGTERM. Complete files are kept.\n"


def test_checkers_end_with_their_parent():
    script = (
        "import os, psutil, signal\n"
        "from retool_mcore.reward import answer\n"
        "assert answer.judge(r'\\ln 8', r'3\\ln 2', timeout_s=60).equivalent\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    pid = int(done.stdout)
    end_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, "the checker outlived its parent"
        time.sleep(0.1)


# A run as the commands have it: its output goes to a log, its messages to the terminal.
RUN = """
import sys, time
from pathlib import Path
from retool_mcore.cli.common import guarded
from retool_mcore.process import redirect_output
from retool_mcore.run.signals import EndedBySignal, StopSignals

@guarded
def run():
    with redirect_output(Path(sys.argv[1])) as terminal:
        with StopSignals(30) as ending:
            while not ending.first_signal:
                print("step", file=terminal, flush=True)
                time.sleep(0.02)
        print("saved", flush=True)
        raise EndedBySignal(ending.first_signal, "saved")

run()
"""


def test_a_run_that_lost_its_terminal_saves_and_ends(tmp_path: Path):
    leader, follower = pty.openpty()
    argv = [sys.executable, "-c", RUN, str(tmp_path / "log")]
    child = subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    try:
        assert b"step" in os.read(leader, 65536)
        os.close(leader)  # what is written from here on is an error
        child.send_signal(signal.SIGHUP)
        assert child.wait(timeout=300) == 129
    finally:
        child.kill()
    assert (tmp_path / "log").read_text() == "saved\n", "no traceback follows"
