"""What an engine will need is made in a process of its own, from the first second of a run on."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from retool_mcore.config import RlConfig, load_config

RUN = """
import sys, time
from functools import partial
from pathlib import Path
from retool_mcore.process import begin_beside, output_to

if __name__ == "__main__":
    with output_to(Path(sys.argv[1])):
        begin_beside(partial(print, "compiled", flush=True))
        begin_beside(partial(time.sleep, 60))
        time.sleep(60)
"""


def test_its_words_are_in_the_log_and_it_ends_with_a_run_that_is_killed(tmp_path: Path):
    script, log = tmp_path / "run.py", tmp_path / "logs" / "rl.log"
    script.write_text(RUN, encoding="utf-8")
    run = subprocess.Popen([sys.executable, script, log], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: log.exists() and "compiled" in log.read_text(encoding="utf-8"))
    until(lambda: len(beside(run.pid)) == 1)  # the one that sleeps
    [left] = beside(run.pid)
    run.kill()
    said, _ = run.communicate(timeout=20)
    assert said == "", "nothing on the terminal"
    until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)


def beside(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if "spawn_main" in " ".join(each.cmdline())]


def until(seen, wait_s: float = 60.0) -> None:
    end_s = time.monotonic() + wait_s
    while not seen():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.parametrize(("nodes", "begun"), [(1, 1), (2, 0)])
def test_a_run_on_one_node_begins_it_before_ray(nodes: int, begun: int, monkeypatch: pytest.MonkeyPatch):
    """Of several nodes the driver's need not be one with an engine."""
    from rich.console import Console

    from retool_mcore.platforms.base import get_platform
    from retool_mcore.train import rl
    from retool_mcore.verl import ray_cluster

    class Reached(Exception):
        pass

    def no_ray(*_: object) -> None:
        order.append("ray")
        raise Reached

    order: list[object] = []
    work = order.clear
    platform = get_platform("cpu")
    monkeypatch.setattr(type(platform), "ahead_of_engine", lambda self, config: work)
    monkeypatch.setattr(platform, "activate", lambda: None, raising=False)
    monkeypatch.setattr(rl, "begin_beside", order.append)
    monkeypatch.setattr(ray_cluster, "cluster", no_ray)
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"cluster.nodes={nodes}"])
    with pytest.raises(Reached):
        rl._run(config, platform, Console(quiet=True))
    assert order == [work] * begun + ["ray"]
