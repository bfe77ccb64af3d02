"""What rows say of themselves is read once, while the driver does something else."""

import threading
from typing import Any

import pytest

from tests.verl.unpadded_scenario import Rows

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def test_rows_are_read_beside_the_update_and_each_once(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.row_reports import RowReports

    rows, reports = Rows(monkeypatch), RowReports()
    keys, asked, may_answer = list(rows.rows), list[list[str]](), threading.Event()
    get = rows.kv_batch_get

    def slow(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert threading.current_thread() is threading.main_thread() or may_answer.wait(20)
        asked.append(keys)
        return get(keys, partition_id, select_fields)

    rows.kv_batch_get = slow  # type: ignore[method-assign]
    reports.read(keys[:5], "train")
    reports.read(keys[5:8], "train")  # the next batch of the step
    assert asked == [], "the driver goes on"
    may_answer.set()
    found = reports.of(keys[:10][::-1], "train")
    assert [(each.extra["row"], each.turns) for each in found] == [(row, 2 + row % 3) for row in range(9, -1, -1)]
    assert reports.of(keys[3:5], "train")[1].extra == {"row": 4}
    assert sorted(asked) == sorted([keys[:5], keys[5:8], [keys[9], keys[8]]]), "what was not begun is read at last"


def test_an_error_of_the_queue_is_raised_where_the_rows_are_needed(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.row_reports import RowReports

    rows, reports = Rows(monkeypatch), RowReports()

    def lost(**_: Any) -> Any:
        raise RuntimeError("a storage unit is gone")

    monkeypatch.setattr(rows, "kv_batch_get", lost)
    reports.read(list(rows.rows), "train")
    with pytest.raises(RuntimeError, match="a storage unit is gone"):
        reports.of(list(rows.rows), "train")


def test_what_could_not_be_read_ahead_is_read_again_when_it_is_needed(monkeypatch: pytest.MonkeyPatch):
    """As of a group that a filter has removed meanwhile, which nobody asks for."""
    from retool_mcore.verl.row_reports import ReadAhead

    asked = list[tuple[list[str], bool]]()

    def ask(keys: list[str], partition_id: str) -> dict[str, str]:
        ahead = threading.current_thread() is not threading.main_thread()
        asked.append((keys, ahead))
        if ahead and "b" in keys:
            raise KeyError("b")
        return {key: f"{partition_id} {key}" for key in keys}

    rows = ReadAhead(ask)
    rows.read(["a"], "train")
    rows.read(["b", "c"], "train")
    assert rows.known() == {"a": "train a"}
    assert rows.of(["c", "a"], "train") == ["train c", "train a"]
    assert sorted(asked) == [(["a"], True), (["b", "c"], True), (["c"], False)]
