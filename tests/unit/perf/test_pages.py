"""Every line of the history is a record, and a damaged one is named."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from retool_mcore.errors import DataError

ROOT = Path(__file__).parents[3]
PERF = ROOT / "perf"


@pytest.fixture(scope="module")
def history() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perf_history", PERF / "history.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks a class's annotations up there
    spec.loader.exec_module(module)
    return module


def test_every_line_of_the_history_is_a_record_in_the_order_of_days(history: ModuleType):
    records = history.read()
    assert len(records) >= 58
    assert [record.date for record in records] == sorted(record.date for record in records)
    assert all(record.topics and record.hardware and record.title and record.text for record in records)


def test_both_ends_of_a_selection_are_included(history: ModuleType):
    records = [history.Record.model_validate(record(f"2026-11-{day}")) for day in (20, 21, 22, 23)]
    found = history.select(records, "", records[1].date, records[2].date, [])
    assert [each.date.day for each in found] == [21, 22]


def test_a_damaged_line_is_named(history: ModuleType, tmp_path: Path):
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(record("2026-11-21")) + "\n" + json.dumps(record("yesterday")) + "\n")
    with pytest.raises(
        DataError, match=r"history\.jsonl, line 2 is not a valid record: date: .* A record has date, commit"
    ):
        history.read(path)


def record(day: str) -> dict[str, object]:
    return {
        "date": day,
        "commit": "0000000",
        "hardware": "H200",
        "topics": ["sandbox"],
        "kind": "measured",
        "command": "",
        "title": "Sandbox",
        "text": "numpy 7.7 ms",
    }
