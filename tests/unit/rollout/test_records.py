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


def test_full_files_are_rotated_and_the_oldest_goes(tmp_path: Path):
    writer = RecordWriter(tmp_path / "runs", rotate_bytes=40, keep=2)
    for number in range(8):
        writer.write({"number": number, "text": "ünïcode"})
    files = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in writer.folder.iterdir()
    }
    assert sorted(files) == ["trajectories.1.jsonl", "trajectories.2.jsonl", "trajectories.jsonl"]
    assert [row["number"] for name in ("2.jsonl", "1.jsonl") for row in files[f"trajectories.{name}"]] == [5, 6]
    assert files["trajectories.jsonl"] == [{"number": 7, "text": "ünïcode"}]


@pytest.mark.parametrize("groups", [1, 8])
def test_a_step_finds_its_groups_among_few_candidates(groups: int):
    sizes = ["train.prompts_per_step=512", "train.mini_batch_prompts=512", f"rollout.record_groups={groups}"]
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", sizes)
    steps = [[f"{step}-{prompt}" for prompt in range(512)] for step in range(200)]
    found = [[uid for uid in uids if is_candidate(uid, config)] for uids in steps]
    assert min(map(len, found)) >= groups
    assert sum(map(len, found)) / len(found) < 40, "few trajectories carry a record"
    for uids, candidates in zip(steps, found, strict=True):
        lowest = sorted(uids, key=lambda uid: group_rank(uid, config.run.seed))[:groups]
        assert set(lowest) <= set(candidates)


def test_a_validation_records_its_first_rows():
    large = ["train.prompts_per_step=512", "train.mini_batch_prompts=512", "rollout.record_groups=2"]
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", large)
    candidates = [row for row in range(600) if is_held_out_candidate(row, config)]
    assert candidates == list(range(19)), "of AIME's 30 problems the groups are found, too"
    none = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", ["rollout.record_groups=0"])
    assert not is_held_out_candidate(0, none)


def test_a_resumed_run_drops_the_rows_that_it_will_write_again(tmp_path: Path):
    writer = RecordWriter(tmp_path, rotate_bytes=60, keep=4)
    for step in range(1, 8):
        writer.write({"step": step, "partition": "train"})
        writer.write({"step": step, "partition": "val"})
    with writer.path.open("a") as file:
        file.write('{"step": 5, "part')  # the kill
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    RecordWriter(tmp_path, rotate_bytes=60, keep=4).drop_rows_after(5)
    names = [f"trajectories.{index}.jsonl" for index in (4, 3, 2, 1)] + ["trajectories.jsonl"]
    rows = [json.loads(line) for name in names for line in (tmp_path / name).read_text().splitlines()]
    assert [(row["step"], row["partition"]) for row in rows] == [
        (step, partition) for step in (3, 4, 5) for partition in ("train", "val")
    ]
    assert (tmp_path / names[0]).read_text() == before[names[0]]
    assert not list(tmp_path.glob(".*")), "a draft is left"
    RecordWriter(tmp_path / "new").drop_rows_after(0)  # a run that has written nothing yet


def record(key: str, acc: float, **more: Any) -> dict[str, Any]:
    whole = json.loads(RECORDED.read_text().splitlines()[0])
    return {**whole, "key": key, "reward_info": {"acc": acc}, **more}


def test_wrong_and_right_trajectories_alternate():
    records = [record("a", 1.0), record("b", 1.0), record("c", 0.0), record("d", 1.0), record("e", 0.0)]
    assert [row["trajectory"] for row in traces(records, 4)] == ["c", "a", "e", "b"]
    assert traces(records, 0) == []


def test_a_row_has_text_and_results_in_order():
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


def test_a_long_text_is_cut_with_a_note():
    long = record("a", 0.0, turns=[{"text": "x" * (MAX_CHARS + 7), "results": []}], extracted=None)
    row = trace(long)
    assert str(row["response"]).endswith("x\n[and 7 characters more]")
    assert row["extracted"] is None and row["right"] is False


@pytest.mark.parametrize(
    ("settings", "key"),
    [(["rollout.record_groups=0"], r"rollout\.record_groups = 0"), (["run.trackers=[]"], r"run\.trackers = \[\]")],
)
def test_a_setting_without_effect_is_refused(settings: list[str], key: str):
    config = ROOT / "configs/rl_tiny_cpu.toml"
    with pytest.raises(ConfigError, match=f"rollout.tracked_trajectories = 4 .* but {key}"):
        load_config(RlConfig, config, ["rollout.tracked_trajectories=4", *settings])
    load_config(RlConfig, config, settings)
