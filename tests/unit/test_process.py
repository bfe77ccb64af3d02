"""A process's signals and output: `retool_mcore/process.py`."""

import atexit
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from retool_mcore import process
from retool_mcore.process import bypass_proxy, exit_on_sigterm, exit_signal, redirect_output, sighup_blocked


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process, "_exit_signals", [])
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_ends_and_a_second_one_does_not_disturb_the_clean_up(handlers):
    for number in (signal.SIGHUP, signal.SIGTERM):
        exit_on_sigterm()
        assert exit_signal() == 0
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        assert (ended.value.code, exit_signal()) == (128 + number, number)
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert exit_signal() == number, "the first one is the reason"


def test_what_nohup_a_shell_and_asyncio_set_is_known(handlers):
    numbers = (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
    for number, handler in zip(numbers, (signal.SIG_IGN, signal.SIG_IGN, of_asyncio := lambda *_: None), strict=True):
        signal.signal(number, handler)
    exit_on_sigterm(ctrl_c=False)
    process.restore_sigquit()
    assert [*map(signal.getsignal, numbers)] == [signal.SIG_IGN, signal.SIG_DFL, of_asyncio]


def test_sighup_is_blocked_for_a_while_and_other_signals_stay_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    with pytest.raises(KeyError), sighup_blocked():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {*before, signal.SIGUSR2, signal.SIGHUP}
        raise KeyError
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == {*before, signal.SIGUSR2}


def test_all_output_goes_to_the_log_and_progress_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for start in ("first", "second"):
        with pytest.raises(KeyError), redirect_output(tmp_path / "logs" / "run") as terminal:
            os.write(1, f"{start}\n".encode())  # as a C library
            os.write(2, b"warning\n")
            print("step 1", file=terminal, flush=True)
            raise KeyError
    atexit.unregister(process._write_exit_output)
    os.write(1, b"after the run\n")
    assert (tmp_path / "logs" / "run").read_text() == "first\nwarning\nsecond\nwarning\n"
    assert capfd.readouterr() == ("after the run\n", "step 1\nstep 1\n")


def test_a_proxy_is_not_asked_for_this_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "theirs.example")
    monkeypatch.setenv("NO_PROXY", "more.example, theirs.example,")
    bypass_proxy()
    own = ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
    assert os.environ["no_proxy"].startswith(",".join(dict.fromkeys(("theirs.example", "more.example", *own))))
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
