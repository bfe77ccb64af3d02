"""Running the project's own commands as a user does, and finding whatever they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from pathlib import Path

from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data.task_model import CHAT_TEMPLATE
from retool_mcore.run.metrics import read_metrics
from tests.sockets import listening, reachable_from_elsewhere

ROOT = Path(__file__).parents[2]
WEST, EAST = "Etc/GMT+12", "Pacific/Kiritimati"  # values of TZ: 26 hours apart, so never on one day
MARK = "RETOOL_TEST_MARK"  # in the environment of every process that a test starts, directly or not


def argv_sft(*settings: str, processes: int = 2) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, "launch/sft_mcore.py", "configs/sft_tiny_cpu.toml", *settings]


def argv_rl(*settings: str) -> list[str]:
    return [sys.executable, "launch/rl.py", "configs/rl_tiny_cpu.toml", *settings]


def argv_retool(*words: str) -> list[str]:
    return [sys.executable, "-m", "retool_mcore", *words]


def sft_settings(task: Path, root: Path, *more: str) -> tuple[str, ...]:
    """Eight steps on the tiny task, validated after four and eight."""
    files = [f"data.train_file={task}/sft_train.parquet", f'validation.files=["{task}/sft_val.parquet"]']
    steps = ("train.steps=8", "validation.every=4", "checkpoint.every_steps=4", "train.global_batch=16")
    return (f"run.root={root}", f"model.path={task}/model", *files, *steps, *more)


def dated(folder: Path) -> str:
    """The setting of a chat template of the tiny task that writes today's date."""
    day = '{{- strftime_now("%Y-%m-%d") -}}'
    system = "{%- if first.role == 'system' -%}"
    assert CHAT_TEMPLATE.count(system) == 1
    (folder / "dated.jinja").write_text(CHAT_TEMPLATE.replace(system, day + system))
    return f"model.chat_template={folder}/dated.jinja"


def day_of(run_dir: Path) -> str:
    """The day that a run has recorded."""
    return str(date.fromisoformat(json.loads((run_dir / FORMAT_FILE).read_text())["date"]))


def run(argv: list[str], mark: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, MARK: mark}, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def succeed(argv: list[str], mark: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """``run`` of a command that must end well and leave no process behind."""
    done = run(argv, mark, timeout_s)
    roots = [Path(word.removeprefix("run.root=")) for word in argv if word.startswith("run.root=")]
    logs = [log.read_text(errors="replace")[-6000:] for root in roots for log in root.rglob("rl.log")]
    assert done.returncode == 0, "\n".join((done.stderr[-3000:], *logs))
    assert_nothing_left(mark)
    return done


@contextmanager
def started(argv: list[str], mark: str, *, on_terminal: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A command as a shell's ``command &`` starts it, or, ``on_terminal``, as a group that Ctrl-C
    reaches.

    Killed on leaving, whatever happened.
    """
    child = subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=on_terminal,
        preexec_fn=partial(_set_signals, signal.SIG_DFL if on_terminal else signal.SIG_IGN),  # noqa: PLW1509
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _set_signals(disposition: signal.Handlers) -> None:
    """What a shell gives: ignored in the background, default in the foreground."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, disposition)


def press_ctrl_c(child: subprocess.Popen[bytes]) -> None:
    """What a terminal does: SIGINT to every process of the foreground group."""
    os.killpg(child.pid, signal.SIGINT)


def marked_processes(mark: str) -> dict[int, str]:
    """Process id -> command line of every live process of a marked command, zombies not counted."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if f"{MARK}={mark}".encode() in environment.split(b"\0") and command:
                found[int(entry.name)] = command
    return found


def assert_only_loopback_listens(mark: str, at_least: int) -> list[str]:
    """Of the marked processes; returns the addresses, at least so many."""
    commands = marked_processes(mark)
    found = listening(commands)
    open_ones = {each: [commands[pid][:60] for pid in found[each]] for each in reachable_from_elsewhere(found)}
    assert not open_ones, f"other machines reach {open_ones}"
    assert len(found) >= at_least, f"only {sorted(found)}: is the run not up?"
    return sorted(found)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"after {timeout_s} s still not: {what}"
        time.sleep(0.2)


def assert_nothing_left(mark: str, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while left := marked_processes(mark):
        assert time.monotonic() < deadline_s, f"left behind after {timeout_s} s: {left}"
        time.sleep(0.5)


def last_step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def exact_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Of each step, what is bit-equal in a run that was interrupted."""
    names = ("step", "loss", "grad_norm", "lr", "perf/total_num_tokens", "loss_tokens", "val_loss")
    return [{name: row[name] for name in names if name in row} for row in read_metrics(run_dir / "metrics.jsonl")]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def assert_one_error(done: subprocess.CompletedProcess[str], message: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(errors) == 1 and message in errors[0], done.stderr[-3000:]
