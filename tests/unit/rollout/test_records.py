"""Trajectory files: one JSON object per line, rotated; and the rows that trackers get."""

import json
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.rollout.records import (
    MAX_CHARS,
    RecordWriter,
    group_rank,
    is_candidate,
    is_held_out_candidate,
    trace,
    traces,
)

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests/report/view/run/trajectories/trajectories.jsonl"


def config_of(*settings: str) -> RlConfig:
    sizes = ("train.prompts_per_step=512", "train.mini_batch_prompts=512")
    return load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", [*sizes, *settings])


@pytest.mark.parametrize("groups", [1, 8])
def test_a_step_finds_its_groups_among_few_candidates(groups: int):
    config = config_of(f"rollout.record_groups={groups}")
    steps = [[f"{step}-{prompt}" for prompt in range(512)] for step in range(200)]
    found = [[uid for uid in uids if is_candidate(uid, config)] for uids in steps]
    assert sum(map(len, found)) / len(found) < 40, "few trajectories carry a record"
    for uids, candidates in zip(steps, found, strict=True):
        lowest = sorted(uids, key=lambda uid: group_rank(uid, config.run.seed))[:groups]
        assert set(lowest) <= set(candidates)


def test_a_validation_records_its_first_rows():
    config = config_of("rollout.record_groups=2")
    candidates = [row for row in range(600) if is_held_out_candidate(row, config)]
    assert candidates == list(range(19)), "of AIME's 30 problems the groups are found, too"
    assert not is_held_out_candidate(0, config_of("rollout.record_groups=0"))


def test_a_resumed_run_drops_the_rows_that_it_will_write_again(tmp_path: Path):
    writer = RecordWriter(tmp_path, rotate_bytes=60, keep=4)
    for step in range(1, 8):  # full files are rotated, and the oldest goes
        writer.write({"step": step, "partition": "train"})
        writer.write({"step": step, "partition": "val"})
    with writer.path.open("a") as file:
        file.write('{"step": 5, "part')  # the kill
    names = [f"trajectories.{index}.jsonl" for index in (4, 3, 2, 1)] + ["trajectories.jsonl"]
    oldest = (tmp_path / names[0]).read_text()
    RecordWriter(tmp_path, rotate_bytes=60, keep=4).drop_rows_after(5)
    rows = [json.loads(line) for name in names for line in (tmp_path / name).read_text().splitlines()]
    wanted = [(step, partition) for step in (3, 4, 5) for partition in ("train", "val")]
    assert [(row["step"], row["partition"]) for row in rows] == wanted
    assert (tmp_path / names[0]).read_text() == oldest
    assert not list(tmp_path.glob(".*")), "a draft is left"
    RecordWriter(tmp_path / "new").drop_rows_after(0)  # a run that has written nothing yet


def record(key: str, acc: float, **more: Any) -> dict[str, Any]:
    whole = json.loads(RECORDED.read_text().splitlines()[0])
    return {**whole, "key": key, "reward_info": {"acc": acc}, **more}


def test_wrong_and_right_trajectories_alternate():
    records = [record(key, acc) for key, acc in (("a", 1.0), ("b", 1.0), ("c", 0.0), ("d", 1.0), ("e", 0.0))]
    assert [row["trajectory"] for row in traces(records, 4)] == ["c", "a", "e", "b"]
    assert traces(records, 0) == []


def test_a_row_has_text_and_results_in_order_and_a_long_text_is_cut():
    whole = record("7-0_1_0", 1.0)
    row = trace(whole)
    response = str(row["response"])
    first, result = whole["turns"][0], whole["turns"][0]["results"][0]
    assert response.startswith(first["text"]) and response.endswith(whole["turns"][-1]["text"])
    assert response.index(first["text"]) < response.index(f"[result: {result['status']}]\n{result['shown']}")
    assert (row["calls"], row["tokens"], row["right"]) == (1, len(whole["response_ids"]), True)
    assert (row["trajectory"], row["ended by"]) == (whole["key"], whole["stop_reason"])
    for name in ("extracted", "truth", "partition", "prompt", "reward"):
        assert row[name] == whole[name]
    row = trace(record("a", 0.0, turns=[{"text": "x" * (MAX_CHARS + 7), "results": []}], extracted=None))
    assert str(row["response"]).endswith("x\n[and 7 characters more]")
    assert row["extracted"] is None and row["right"] is False


@pytest.mark.parametrize(("key", "value"), [("rollout.record_groups", "0"), ("run.trackers", "[]")])
def test_trajectories_for_trackers_need_records_and_trackers(key: str, value: str):
    with pytest.raises(ConfigError, match=f"rollout.tracked_trajectories = 4 .* but {key}"):
        config_of("rollout.tracked_trajectories=4", f"{key}={value}")
