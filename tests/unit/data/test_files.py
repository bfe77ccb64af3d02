"""Rows that are written are the rows that are read, and a bad column is one error."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.data.files import write_parquet
from retool_mcore.errors import DataError

TEXT = st.text(max_size=4)
CALL = st.fixed_dictionaries({"name": TEXT}, optional={"arguments": TEXT})
MESSAGE = st.fixed_dictionaries({"role": TEXT}, optional={"tool_calls": st.none() | st.lists(CALL, max_size=2)})
ROW = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=2), "tools": st.none() | st.lists(CALL, max_size=1), "n": st.integers(0, 9)}
)


@given(st.lists(ROW, min_size=1, max_size=12))
def test_rows_are_read_as_they_were_written(tmp_path: Path, rows: list[dict[str, Any]]):
    write_parquet(tmp_path / "rows.parquet", rows)
    assert without_nulls(pq.read_table(tmp_path / "rows.parquet").to_pylist()) == without_nulls(rows)


def without_nulls(value: Any) -> Any:
    """A parquet column gives every struct the keys that only some have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def test_a_column_of_two_types_is_one_error_and_no_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"rows\.parquet: a column would have values of different types: .*str"):
        write_parquet(tmp_path / "rows.parquet", [{"n": 1}, {"n": json.dumps({})}])
    assert not (tmp_path / "rows.parquet").exists()
