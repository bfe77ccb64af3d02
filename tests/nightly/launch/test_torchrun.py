"""The agent of SFT's ranks hands a signal on and ends as they do, without a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from retool_mcore.cli import torchrun

# A rank: it exits with the code of its first signal, or after some seconds.
RANK = """
import signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
signal.signal(signal.SIGINT, lambda *_: heard.append(2))
print("up", flush=True)
end_s = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end_s and not (heard and sys.argv[2] == "heeds"):
    time.sleep(0.01)
sys.exit(143 if heard == [1] else 130 if heard == [2] else 77)
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in torchrun.SIGNALS}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def end(monkeypatch: pytest.MonkeyPatch, sent: Callable[[], None], how: str = "heeds") -> int | str | None:
    """The agent's exit code, in whose time ``sent`` sends this process signals."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    asked: list[str] = []

    def agent() -> None:
        asked.extend(launcher.config_from_args(launcher.parse_args(sys.argv[1:]))[0].signals_to_handle.split(","))
        with subprocess.Popen([sys.executable, "-c", RANK, "10", how], stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
            sent()
            code = rank.wait()
        failure = ProcessFailure(local_rank=0, pid=rank.pid, exitcode=code, error_file="")
        raise ChildFailedError("rank", {0: failure})

    monkeypatch.setattr(launcher, "main", agent)
    monkeypatch.setattr(sys, "argv", ["torchrun", "--standalone", "--nproc-per-node", "2", "rank.py"])
    with pytest.raises(SystemExit) as caught:
        torchrun.main()
    assert asked == ["SIGQUIT"], "torchrun's own handler would end the ranks and raise"
    return caught.value.code


def only_rank(how: str) -> psutil.Process:
    """The rank that ``end`` started. Other children, ended ones too, belong to earlier tests."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    [rank] = [child for child in alive if RANK in (argv := child.cmdline()) and argv[-1] == how]
    return rank


def me(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_get_a_signal_once(monkeypatch: pytest.MonkeyPatch, number: int, code: int):
    """timeout(1) sends two, and so does a terminal with a shell's trap."""

    def twice() -> None:
        me(number)
        time.sleep(0.2)
        me(signal.SIGTERM)

    assert end(monkeypatch, twice) == code


def test_a_second_signal_kills_ranks_that_ignore_the_first(monkeypatch: pytest.MonkeyPatch):
    def again() -> None:
        me(signal.SIGTERM)
        time.sleep(1.2)
        me(signal.SIGTERM)

    started_s = time.monotonic()
    assert end(monkeypatch, again, "deaf") == 143
    assert time.monotonic() - started_s < 8


def test_a_rank_that_the_kernel_killed_is_one_error_and_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def kill() -> None:
        only_rank("deaf").kill()

    assert end(monkeypatch, kill, "deaf") == 3
    assert capfd.readouterr().err == (
        "error: rank 0 of this node was killed by SIGKILL, probably because the node ran out of memory: see dmesg.\n"
    )
