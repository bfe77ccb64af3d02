"""Which recorded trajectories a tracker is given, and what each row of its table says."""

import json
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.rollout.records import MOST_CHARS, trace, traces

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests/report/view/run/trajectories/trajectories.jsonl"


def record(key: str, acc: float, **more: Any) -> dict[str, Any]:
    whole = json.loads(RECORDED.read_text().splitlines()[0])
    return {**whole, "key": key, "reward_info": {"acc": acc}, **more}


def test_wrong_and_right_come_in_turns_and_no_more_than_asked_for():
    records = [record("a", 1.0), record("b", 1.0), record("c", 0.0), record("d", 1.0), record("e", 0.0)]
    assert [row["trajectory"] for row in traces(records, 4)] == ["c", "a", "e", "b"]
    assert [row["trajectory"] for row in traces(records, 9)] == ["c", "a", "e", "b", "d"]
    assert [row["trajectory"] for row in traces(records[:2], 2)] == ["a", "b"]
    assert traces(records, 0) == []


def test_a_row_has_what_was_said_and_printed_in_its_order():
    whole = record("7-0_1_0", 1.0)
    row = trace(whole)
    said = str(row["response"])
    first, result = whole["turns"][0], whole["turns"][0]["results"][0]
    assert said.startswith(first["text"]) and said.endswith(whole["turns"][-1]["text"])
    assert said.index(first["text"]) < said.index(f"[result: {result['status']}]\n{result['shown']}")
    assert (row["calls"], row["tokens"], row["right"]) == (1, len(whole["response_ids"]), True)
    for name in ("extracted", "truth", "partition"):
        assert row[name] == whole[name]


def test_a_long_text_is_cut_aloud():
    long = record("a", 0.0, turns=[{"text": "x" * (MOST_CHARS + 7), "results": []}], extracted=None)
    row = trace(long)
    assert str(row["response"]).endswith("x\n[and 7 characters more]")
    assert row["extracted"] is None and row["right"] is False


@pytest.mark.parametrize(
    ("settings", "key"),
    [(["rollout.record_groups=0"], r"rollout\.record_groups = 0"), (["run.trackers=[]"], r"run\.trackers = \[\]")],
)
def test_a_setting_without_effect_is_refused(settings: list[str], key: str):
    config = ROOT / "configs/rl_tiny_cpu.toml"
    with pytest.raises(ConfigError, match=f"rollout.tracked_trajectories = 4 .* and {key}"):
        load_config(RlConfig, config, ["rollout.tracked_trajectories=4", *settings])
    load_config(RlConfig, config, settings)
