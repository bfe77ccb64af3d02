"""RL as a user runs it: verl's PPO trainer under Ray, Megatron and SGLang on the CPU, live tool
calls, kills.
"""

import json
import math
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from retool_mcore.data.prompt_format import recorded_format
from retool_mcore.run.metrics import read_metrics
from retool_mcore.run.start import STAGES, begun
from tests import forked
from tests.e2e.commands import (
    EAST,
    WEST,
    argv_rl,
    assert_nothing_left,
    assert_only_loopback_listens,
    dated,
    day_of,
    kill,
    last_step,
    marked_processes,
    press_ctrl_c,
    started,
    succeed,
    wait_until,
)
from tests.sockets import listening

pytestmark = [pytest.mark.timeout(900)]

START_S = 300


def settings(task: Path, root: Path, *more: str) -> tuple[str, ...]:
    files = (f"data.train_file={task}/rl_train.parquet", f'validation.files=["{task}/rl_val.parquet"]')
    size = ("train.prompts_per_step=4", "train.mini_batch_prompts=4", "rollout.group_size=4")
    steps = ("train.steps=4", "validation.every=4", "checkpoint.every_steps=2")
    return (f"run.root={root}", f"model.path={task}/model", *files, *size, *steps, *more)


def test_a_killed_rl_run_resumes_and_leaves_no_process(
    task: Path, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
):
    """A run whose engine is killed after step 3, and that Ctrl-C ends while Ray starts, finishes.

    It resumes on another day than it started on, and its prompts keep the first day.
    """
    monkeypatch.setenv("TZ", WEST)
    own = (dated(tmp_path), "run.name=rl", "validation.before=true")
    own += ("train.max_engine_restarts=0",)  # with restarts: test_engine_restart.py
    argv, run_dir = argv_rl(*settings(task, tmp_path, *own)), tmp_path / "rl"
    with started(argv, mark) as driver:
        wait_until(lambda: last_step(run_dir) >= 1, "step 1", START_S)
        assert_only_loopback_listens(mark, at_least=20)  # takes seconds, in which a step may end
        assert_the_engines_server_asks_for_a_key(mark)
        wait_until(lambda: last_step(run_dir) >= 3, "step 3", START_S)
        scheduler = [pid for pid, command in marked_processes(mark).items() if "sglang::scheduler" in command]
        kill(scheduler[0])
        assert driver.wait(timeout=240) != 0, "a dead engine must end the run with an error, not hang it"
        assert_nothing_left(mark)
    monkeypatch.setenv("TZ", EAST)
    with started(argv, mark, on_terminal=True) as driver:
        wait_until(lambda: "raylet" in " ".join(marked_processes(mark).values()), "Ray starts", START_S)
        press_ctrl_c(driver)
        assert driver.wait(timeout=60) == 130
        assert_nothing_left(mark, timeout_s=30)
    done = succeed(argv, mark, timeout_s=600)
    assert [stage for stage, _ in begun(run_dir)] == [stage for stage in STAGES if stage != "validation"], "a resume"
    lines = [line for line in done.stderr.splitlines() if line.strip().endswith(STAGES["engines"])]
    assert len(lines) == 1, "the output is no terminal: a line for each stage"
    before, *rows = read_metrics(run_dir / "metrics.jsonl")
    assert before["step"] == 0 and 0 <= before["val/accuracy"] <= 1 and "critic/rewards/mean" not in before
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        # Log-probabilities of rollout and actor, on the same tokens, after each weight update.
        assert row["training/rollout_probs_diff_max"] <= 1e-4
        assert math.isfinite(row["actor/pg_loss"]) and row["rollout/dropped"] == 0
    assert "val/accuracy" in rows[-1]
    first = [row for row in rows if "timing_s/start" in row][-1]  # of the last start
    assert 0 < first["timing_s/start/engines"] < first["timing_s/start"]
    assert_written_once(run_dir, [before, *rows])
    assert day_of(run_dir / "export") == day_of(run_dir)
    recorded = recorded_format(run_dir / "export")
    assert recorded is not None and recorded.protocol == "hermes"
    assert (run_dir / "export" / "model.safetensors").stat().st_size > 1_000_000


def test_ctrl_c_ends_a_start_that_would_wait_for_ever(task: Path, tmp_path: Path, mark: str):
    """Ray has one CPU, and the transfer queue's processes need more."""
    words = ("run.name=waits", "verl_overrides.ray_kwargs.ray_init.num_cpus=1")
    with started(argv_rl(*settings(task, tmp_path, *words)), mark, on_terminal=True) as driver:
        began = tmp_path / "waits/start.jsonl"
        wait_until(lambda: began.exists() and '"workers"' in began.read_text(), "it builds the workers", START_S)
        press_ctrl_c(driver)
        assert driver.wait(timeout=90) == 130
    assert_nothing_left(mark)


def assert_the_engines_server_asks_for_a_key(mark: str) -> None:
    """SGLang unpickles the body of this request."""
    commands, codes = marked_processes(mark), []
    for address, pids in listening(commands).items():
        if any("ray::MeasuredServer" in commands[pid] for pid in pids):
            with suppress(httpx.HTTPError):  # a port of Ray's
                codes.append(httpx.post(f"http://{address}/load_lora_adapter_from_tensors", json={}).status_code)
    assert codes == [401]


def assert_written_once(run_dir: Path, rows: list[dict[str, float]]) -> None:
    """Step 3 was done twice: its first scalars and trajectories are gone, nobody else has written
    any.
    """
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    scalars = {tag: [event.step for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    names = {name for row in rows for name in row} - {"step", "unix_s"}
    assert scalars == {name: [row["step"] for row in rows if name in row] for name in names}
    trajectories = [json.loads(line) for line in (run_dir / "trajectories" / "trajectories.jsonl").open()]
    assert {"prompt_ids", "response_ids", "loss_mask", "logprobs", "turns", "reward"} <= set(trajectories[0])
    groups = Counter((row["partition"], row["step"], row["key"].split("_")[0]) for row in trajectories)
    assert set(groups.values()) == {4}, "whole groups"
    assert Counter(which[:2] for which in groups) == {("val", 0): 2, ("val", 4): 2} | {
        ("train", step): 2 for step in (1, 2, 3, 4)
    }
    for row in trajectories:
        assert row["prompt"].startswith(f"<|im_start|>system\n{day_of(run_dir)}") and row["truth"]
        if row["partition"] == "val":
            assert (row["actor_logprobs"], row["advantage"]) == (None, None)
            continue
        gaps = [
            a - b for a, b, own in zip(row["logprobs"], row["actor_logprobs"], row["loss_mask"], strict=True) if own
        ]
        assert max(map(abs, gaps)) <= 1e-4 and isinstance(row["advantage"], float)


def test_all_mistakes_are_reported_at_once(task: Path, tmp_path: Path):
    words = ("cluster.gpus_per_node=8", "parallel.tp=8", "data.train_file=absent.parquet")
    done = forked.run(*argv_rl(*settings(task, tmp_path, *words))[1:])
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for message in ("parallel.tp = 8 does not divide the 4 key-value heads", "absent.parquet"):
        assert sum(message in line for line in errors) == 1, done.stderr[-3000:]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("verl.yaml"))
