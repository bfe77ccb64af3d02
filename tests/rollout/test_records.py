"""Trajectory files: one JSON object a line, rotated, the oldest deleted."""

from __future__ import annotations

import json
from pathlib import Path

from retool_mcore.config import RlConfig, load_config
from retool_mcore.rollout.records import RecordWriter, is_sampled

ROOT = Path(__file__).parents[2]


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


def test_about_sixteen_trajectories_of_a_large_step_are_recorded_and_one_of_a_group_at_most():
    config = load_config(
        RlConfig, ROOT / "configs/rl_tiny_cpu.toml", ["train.prompts_per_step=512", "train.mini_batch_prompts=512"]
    )
    chosen = [(uid, session) for uid in range(51_200) for session in range(2) if is_sampled(str(uid), session, config)]
    assert 1400 < len(chosen) < 1800, "100 steps of 512 prompts"
    assert {session for _, session in chosen} == {0}
