"""Every line of the history is a record, and a damaged one is named."""

import json
from pathlib import Path

import pytest

from retool_mcore.errors import DataError
from tests.unit.perf.modules import history


def test_every_line_of_the_history_is_a_record_in_the_order_of_days():
    records = history.read()
    assert len(records) >= 58
    assert [record.date for record in records] == sorted(record.date for record in records)
    assert all(record.topics and record.hardware and record.title and record.text for record in records)


@pytest.mark.parametrize(
    ("topic", "words", "days"), [("", [], [21, 22]), ("FP8", [], [22]), ("", ["NUMPY", "sand"], [21])]
)
def test_a_selection_has_both_ends_its_topic_and_all_words(topic: str, words: list[str], days: list[int]):
    records = [history.Record.model_validate(record(f"2026-11-{day}")) for day in (20, 21, 22, 23)]
    records[2] = records[2].model_copy(update={"topics": ["RL", "FP8"], "text": "sand"})
    found = history.select(records, topic, records[1].date, records[2].date, words)
    assert [each.date.day for each in found] == days


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(record("2026-11-21")) + "\n" + json.dumps(record("yesterday")) + "\n")
    with pytest.raises(
        DataError, match=r"history\.jsonl, line 2 is not a valid record: date: .* A record has date, commit"
    ):
        history.read(path)


def record(day: str) -> dict[str, object]:
    texts = {"commit": "0000000", "hardware": "H200", "kind": "measured", "command": "", "title": "Sandbox"}
    return {**texts, "date": day, "topics": ["sandbox"], "text": "numpy 7.7 ms"}
