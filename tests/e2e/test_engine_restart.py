"""An engine killed while it samples is started again with the actor's weights, in every mode."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from retool_mcore.run.start import begun
from tests.e2e.commands import argv_rl, assert_nothing_left, kill, last_step, marked_processes, started, wait_until
from tests.e2e.test_rl import START_S, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODES = {
    "sync": (),
    "partial_rollout": ("train.mode=partial_rollout",),
    "async": ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1", "train.mini_batch_prompts=2"),
}


def kill_one(mark: str, name: str) -> None:
    """Kill the one process of the run whose title has ``name``, when there is one."""
    wait_until(lambda: any(name in title for title in marked_processes(mark).values()), name, START_S)
    [pid] = [pid for pid, title in marked_processes(mark).items() if name in title]
    kill(pid)


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("partial_rollout", "async"))]
)
def test_a_step_whose_engine_dies_goes_on_with_a_new_one(task: Path, tmp_path: Path, mark: str, mode: str):
    """Killed twice: the scheduler in step 1, which samples with the first weights, and later the
    server, when the actor has learnt.
    """
    own = ("run.name=rl", "rollout.max_response_tokens=400", "rollout.record_groups=4", "train.max_engine_restarts=2")
    argv, run_dir = argv_rl(*settings(task, tmp_path, *own, *MODES[mode])), tmp_path / "rl"
    with started(argv, mark) as driver:
        wait_until(lambda: bool(begun(run_dir)) and begun(run_dir)[-1][0] == "steps", "step 1", START_S)
        kill_one(mark, "sglang::scheduler")
        wait_until(lambda: last_step(run_dir) >= 2, "step 2 after the restart", START_S)
        kill_one(mark, "ray::MeasuredServer")
        code = driver.wait(timeout=START_S)
    log = (run_dir / "logs" / "rl.log").read_text(errors="replace")
    assert code == 0, log[-6000:]
    assert_nothing_left(mark)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["engine/restarts"] == 1 and sum(row["engine/restarts"] for row in rows) == 2
    assert log.count("started again in") == 2
    for row in rows:
        assert row["rollout/dropped"] == 0
        if mode == "sync":  # a wrong weight of a new engine would show here
            assert row["mismatch/max"] <= 1e-4
    trajectories = [json.loads(line) for line in (run_dir / "trajectories" / "trajectories.jsonl").open()]
    groups = Counter((row["step"], row["key"].split("_")[0]) for row in trajectories if row["partition"] == "train")
    assert len(groups) == 16 and set(groups.values()) == {4}, "each prompt once, with all of its trajectories"
