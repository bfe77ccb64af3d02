"""The quickstart's stages: progress, failures, a second start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from retool_mcore import quickstart
from retool_mcore.quickstart import StageFailed, Stages


def stages(root: Path) -> Stages:
    return Stages(root, Console(quiet=True))


def test_a_finished_stage_is_not_run_again(tmp_path: Path):
    touch = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.write_text(path.read_text() + 'x')"
    counter = tmp_path / "counter"
    counter.write_text("")
    for _ in range(2):
        stages(tmp_path).run("count", "counting", "-c", touch, str(counter))
    assert counter.read_text() == "x"


def test_a_failed_stage_shows_the_end_of_its_log_and_is_run_again(tmp_path: Path):
    fail = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(StageFailed, match=r"failing failed with exit code 3(.|\n)*the reason"):
        stages(tmp_path).run("fail", "failing", "-c", fail)
    stages(tmp_path).run("fail", "failing", "-c", "pass")
    state = json.loads((tmp_path / "stages.json").read_text())["fail"]
    assert state["done"] and state["seconds"] > 0
    assert (tmp_path / "logs" / "fail.log").read_text() == "the reason\n"


def test_progress_is_asked_for_while_a_stage_runs(tmp_path: Path):
    seen: list[int] = []

    def watch() -> tuple[int, int | None, str]:
        seen.append(1)
        return len(seen), 10, "word"

    stages(tmp_path).run("wait", "waiting", "-c", "import time; time.sleep(1.2)", watch=watch)
    assert len(seen) >= 2


def test_killing_the_quickstart_ends_its_command(tmp_path: Path):
    """The commands that a stage starts ask for SIGTERM when their parent dies, however it dies."""
    child = (
        "import time; from retool_mcore.process import end_with_parent_if_requested as end; end(); "
        "print('up', flush=True); "
    )
    parent = (
        "from pathlib import Path; from rich.console import Console; from retool_mcore.quickstart import Stages; "
        f"Stages(Path({str(tmp_path)!r}), Console(quiet=True)).run('s', 's', '-c', {child + 'time.sleep(60)'!r})"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        log = tmp_path / "logs" / "s.log"
        deadline_s = time.monotonic() + 300
        while not (log.exists() and log.read_text() == "up\n"):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(children) == 1
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline_s, os.listdir(f"/proc/{children[0]}")
        time.sleep(0.1)


def test_a_log_has_a_line_for_each_stage_and_one_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart, "LINE_EVERY_S", 1.0)
    log = tmp_path / "out"
    with log.open("w") as file:
        made = Stages(tmp_path, Console(file=file, width=80))
        watch = iter(range(1, 100))
        command = ("-c", "import time; time.sleep(2.6)")
        made.run("wait", "waiting", *command, watch=lambda: (next(watch), 10, "step 3/10, loss 0.5"))
        made.run("short", "no watch", "-c", "pass")
    lines = log.read_text().splitlines()
    assert lines[0] == f"   starts     waiting; log: {tmp_path}/logs/wait.log"
    [second] = [number for number, line in enumerate(lines) if "no watch; log" in line]
    said, ended = lines[1 : second - 1], lines[second - 1]
    assert len(said) >= 2 and all(line.endswith("s ... waiting: step 3/10, loss 0.5") for line in said)
    assert ended.endswith("s     waiting") and lines[-1].endswith("s     no watch")


def test_a_terminal_has_a_bar_and_no_such_lines(tmp_path: Path):
    log = tmp_path / "out"
    with log.open("w") as file:
        Stages(tmp_path, Console(file=file, force_terminal=True, width=80)).run("short", "no watch", "-c", "pass")
    assert "starts" not in log.read_text() and "no watch" in log.read_text()
