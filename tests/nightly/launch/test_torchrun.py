"""The agent of SFT's ranks hands a signal on and ends as they do, without a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from retool_mcore.cli import torchrun

# A rank: it exits with the code of its first signal, or after some seconds.
RANK = """
import signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(143))
signal.signal(signal.SIGINT, lambda *_: heard.append(130))
print("up", flush=True)
end_s = time.monotonic() + 10
while time.monotonic() < end_s and not (heard and sys.argv[1] == "heeds"):
    time.sleep(0.01)
sys.exit(heard[0] if len(heard) == 1 else 77)
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in torchrun.SIGNALS}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def end(monkeypatch: pytest.MonkeyPatch, how: str, *signals: tuple[int, float]) -> int | str | None:
    """The agent's exit code; this process gets ``signals`` with pauses, the rank gets SIGKILL."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    asked: list[str] = []

    def agent() -> None:
        asked.extend(launcher.config_from_args(launcher.parse_args(sys.argv[1:]))[0].signals_to_handle.split(","))
        with subprocess.Popen([sys.executable, "-c", RANK, how], stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
            for number, pause_s in signals:
                os.kill(rank.pid if number == signal.SIGKILL else os.getpid(), number)
                time.sleep(pause_s)
            code = rank.wait()
        failure = ProcessFailure(local_rank=0, pid=rank.pid, exitcode=code, error_file="")
        raise ChildFailedError("rank", {0: failure})

    monkeypatch.setattr(launcher, "main", agent)
    monkeypatch.setattr(sys, "argv", ["torchrun", "--standalone", "--nproc-per-node", "2", "rank.py"])
    with pytest.raises(SystemExit) as caught:
        torchrun.main()
    assert asked == ["SIGQUIT"], "torchrun's own handler would end the ranks and raise"
    return caught.value.code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_get_a_signal_once(monkeypatch: pytest.MonkeyPatch, number: int, code: int):
    """timeout(1) sends two, and so does a terminal with a shell's trap."""
    assert end(monkeypatch, "heeds", (number, 0.2), (signal.SIGTERM, 0)) == code


def test_a_second_signal_kills_ranks_that_ignore_the_first(monkeypatch: pytest.MonkeyPatch):
    started_s = time.monotonic()
    assert end(monkeypatch, "deaf", (signal.SIGTERM, 1.2), (signal.SIGTERM, 0)) == 143
    assert time.monotonic() - started_s < 8


def test_a_rank_that_the_kernel_killed_is_one_error_and_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    assert end(monkeypatch, "deaf", (signal.SIGKILL, 0)) == 3
    assert capfd.readouterr().err == (
        "error: rank 0 of this node was killed by SIGKILL, probably because the node ran out of memory: see dmesg.\n"
    )
