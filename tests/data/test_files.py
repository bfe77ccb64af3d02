"""Rows on disk: the same rows as in a list, and no more memory for ten times as many."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.data import files
from retool_mcore.data.files import Spool
from retool_mcore.errors import DataError

TEXT = st.text(max_size=4)
CALL = st.fixed_dictionaries({"name": TEXT}, optional={"arguments": TEXT})
MESSAGE = st.fixed_dictionaries({"role": TEXT}, optional={"tool_calls": st.none() | st.lists(CALL, max_size=2)})
ROW = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=2), "tools": st.none() | st.lists(CALL, max_size=1), "n": st.integers(0, 9)}
)


@given(st.lists(ROW, min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=200)
def test_a_file_written_in_parts_is_the_file_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], part: int
):
    monkeypatch.setattr(files, "WRITE_ROWS", part)
    files.write_parquet(tmp_path / "parts.parquet", Spool(rows))
    parts, whole = pq.read_table(tmp_path / "parts.parquet"), pa.Table.from_pylist(rows)
    assert parts.to_pylist() == whole.to_pylist() or sorted_keys(parts) == sorted_keys(whole)


def sorted_keys(table: Any) -> str:
    return json.dumps(table.to_pylist(), sort_keys=True)


@given(st.lists(ROW, max_size=8))
def test_a_spool_is_a_list(rows: list[dict[str, Any]]):
    spool = Spool(rows)
    assert list(spool) == rows and len(spool) == len(rows)
    assert spool[1:3] == rows[1:3]
    spool.append({"one": "more"})
    assert spool[-1] == {"one": "more"} and spool[: len(rows)] == rows
    with pytest.raises(IndexError):
        spool[len(rows) + 1]


def test_a_full_folder_is_one_error(monkeypatch: pytest.MonkeyPatch):
    spool = Spool()
    spool._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with spool._file, pytest.raises(DataError, match=r"row 0 cannot be kept there: No space left.*TMPDIR"):
        spool.append({"a": 1})


def peak_mib(code: str) -> float:
    """Of a process that runs ``code``, above what it had before."""
    told = (
        "import resource, sys\nfrom retool_mcore.cli.main import main\n"
        "import retool_mcore.data.rl, retool_mcore.data.convert\n"
        "import retool_mcore.data.files, retool_mcore.data.sources\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"{code}\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", told], capture_output=True, text=True, check=True)
    return float(found.stdout.split()[-1])


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_ten_times_the_rows_take_hardly_more_memory(tmp_path: Path, command: str):
    """15 MiB of rows and 150 from ten files, which a list of rows would hold several times over."""
    draw, peaks = random.Random(0), []
    for count in (1, 10):
        folder = tmp_path / f"in{count}"
        folder.mkdir()
        for number in range(count):
            with (folder / f"part{number}.jsonl").open("w") as file:
                for index in range(1500):
                    problem = f"What is {number} + {index}? {draw.randbytes(5000).hex()}"
                    said = [{"role": "user", "content": problem}, {"role": "assistant", "content": "\\boxed{4}"}]
                    row = {"messages": said} if command == "sft" else {"problem": problem, "answer": "4"}
                    file.write(json.dumps(row) + "\n")
        out = tmp_path / f"out{count}.parquet"
        argv = ["retool", "data", command, str(folder), "--out", str(out)]
        peaks.append(
            peak_mib(f"sys.argv = {argv!r}\ntry:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code")
        )
        assert pq.read_metadata(out).num_rows == 1500 * count
    assert peaks[1] < peaks[0] + 60, peaks
