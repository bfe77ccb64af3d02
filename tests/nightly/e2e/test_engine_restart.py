"""An engine killed while it samples is started again with the actor's weights, in every mode."""

import json
from collections import Counter
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from retool_mcore.run.start import begun
from tests.e2e.commands import (
    argv_rl,
    assert_nothing_left,
    kill,
    last_step,
    marked_processes,
    started,
    wait_until,
)
from tests.e2e.test_rl import START_S, settings

pytestmark = [pytest.mark.timeout(900)]

MODES = {
    "sync": (),
    "partial_rollout": ("train.mode=partial_rollout",),
    "async": ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1", "train.mini_batch_prompts=2"),
}
# Random weights answer nothing right; by the penalty for length they learn all the same.
OWN = ("run.name=rl", "rollout.max_response_tokens=400", "rollout.record_groups=4", "train.max_engine_restarts=2")
OWN += ("reward.overlong_buffer_tokens=400",)


def kill_one(mark: str, name: str) -> None:
    """Kill the one process of the run whose title has ``name``, when there is one."""
    wait_until(lambda: any(name in title for title in marked_processes(mark).values()), name, START_S)
    [pid] = [pid for pid, title in marked_processes(mark).items() if name in title]
    kill(pid)


def rows_of_a_run_killed_twice(argv: list[str], run_dir: Path, mark: str) -> list[dict[str, float]]:
    """The scheduler is killed in step 1, which samples with the first weights; the server later,
    when the actor has learnt.
    """
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
    assert log.count(" restarted in ") == 2
    assert [row["rollout/dropped"] for row in rows] == [0] * 4
    trajectories = [json.loads(line) for line in (run_dir / "trajectories" / "trajectories.jsonl").open()]
    groups = Counter((row["step"], row["key"].split("_")[0]) for row in trajectories if row["partition"] == "train")
    assert len(groups) == 16 and set(groups.values()) == {4}, "each prompt once, with all of its trajectories"
    return rows


@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_engine_dies_continues_with_a_new_one(task: Path, tmp_path: Path, mark: str, mode: str):
    argv = argv_rl(*settings(task, tmp_path, *OWN, *MODES[mode]))
    rows = rows_of_a_run_killed_twice(argv, tmp_path / "rl", mark)
    assert rows[0]["actor/grad_norm"] > 0, "or every weight would be right"
    if mode == "sync":  # a wrong weight of a new engine would show here
        assert max(row["mismatch/max"] for row in rows) <= 1e-4
