"""Nothing of a run is touched before its lock is held, by no second start and on no node."""

import fcntl
import signal
from pathlib import Path

import pytest

from tests.nightly.launch.scripts import RL, RL_ONE, SFT, Scripts

LASTS = "sleep 100 & wait"
SLOW_TO_END = """trap "kill \\$!; sleep 2; echo ended >>$FAKE/order; exit 143" TERM
echo began >>$FAKE/order
sleep 100 & wait"""


def all_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Each file's inode and time of change: one that is made anew is another."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items() if not path.is_dir()}


@pytest.mark.parametrize(
    ("script", "env"), [(RL_ONE, {}), (SFT, {}), (RL, {"FAKE_NODES": "2", "NODE_RANK": "0"})], ids=["rl", "sft", "two"]
)
def test_a_second_start_is_refused_and_touches_nothing(scripts: Scripts, script: str, env: dict[str, str]):
    scripts.replace("run", LASTS)
    first = scripts.start(script, **env)
    scripts.until(lambda: "run" in scripts.calls(), "the first runs")
    before = [all_files(scripts.folder / part) for part in ("runs", "sandbox")]
    called = scripts.calls()
    assert scripts.start(script, "second", **env).wait(timeout=300) == 2
    assert f"runs/one is in use by process {first.pid} on " in scripts.output("second")
    assert [all_files(scripts.folder / part) for part in ("runs", "sandbox")] == before
    assert scripts.calls() == called, "not even preflight looks"
    assert first.poll() is None


def test_the_second_node_of_a_second_start_is_refused(scripts: Scripts):
    """Else it would join the Ray of the first, or its ranks."""
    scripts.replace("run", LASTS)
    scripts.start(SFT, FAKE_NODES="2", NODE_RANK="0")
    scripts.until(lambda: "run" in scripts.calls(), "the first runs")
    with (scripts.run_dir / ".lock.node1").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert scripts.start(SFT, "second", FAKE_NODES="2", NODE_RANK="1").wait(timeout=300) == 2
    assert "is in use by process unknown" in scripts.output("second")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_start_that_overlaps_the_old_one_waits_until_all_of_it_has_ended(scripts: Scripts, how: int, code: int):
    """As after a requeue. A killed script leaves a run that ends later."""
    scripts.replace("run", SLOW_TO_END)
    first = scripts.start(RL_ONE)
    scripts.until((scripts.folder / "order").exists, "the first runs")
    second = scripts.start(RL_ONE, "second", LOCK_WAIT_S="60")
    scripts.until(lambda: "waiting up to 60 s for it to end" in scripts.output("second"), "the second waits")
    first.send_signal(how)
    assert first.wait(timeout=300) == code
    scripts.until(lambda: (scripts.folder / "order").read_text().count("\n") == 3, "the second runs")
    assert (scripts.folder / "order").read_text().split() == ["began", "ended", "began"]
    assert (scripts.folder / "sandbox" / "one" / "sandbox.sock").is_socket()
    assert second.poll() is None


def test_a_recipe_that_runs_already_is_not_touched(scripts: Scripts):
    script, out = scripts.folder / "recipe.sh", scripts.folder / "out"
    script.write_text(f"OUT={out}; source launch/stages.sh; stage one {out}/made touch {out}/made")
    out.mkdir()
    with (out / ".lock.stages").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert scripts.start(str(script)).wait(timeout=300) == 2
    assert "/out is in use by process" in scripts.output() and not (out / "made").exists()
    assert scripts.start(str(script)).wait(timeout=300) == 0 and (out / "made").exists()
