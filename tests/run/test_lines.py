"""Lines for people are folded between words on a terminal, and whole anywhere else."""

import sys
from pathlib import Path

import pytest

from retool_mcore.run.lines import _fold
from tests.terminal import lines_on_terminal

LONG = "error: the folder runs/mine cannot be written. Run `retool plan CONFIG` first, or set run.root to one that can."


def test_no_word_is_cut_and_what_follows_stands_under_the_last_column():
    row = "    12.5 s  configured   9.0 GiB  tp 1 pp 1, recompute auto, engines tp 1 with 90%, idle actor stays"
    assert _fold(row, 70).split("\n") == [
        "    12.5 s  configured   9.0 GiB  tp 1 pp 1, recompute auto, engines",
        "                                  tp 1 with 90%, idle actor stays",
    ]
    assert _fold(row, 200) == row


def test_what_stands_in_backticks_is_copied_whole_where_it_fits():
    assert _fold(LONG, 62).split("\n") == [
        "error: the folder runs/mine cannot be written. Run",
        "  `retool plan CONFIG` first, or set run.root to one that can.",
    ]
    narrow = _fold(LONG, 16).split("\n")
    assert "  `retool plan" in narrow and max(map(len, narrow)) <= 16


@pytest.mark.parametrize("columns", ["60", "200"])
def test_the_width_is_that_of_the_terminal(columns: str, tmp_path: Path):
    code = f"from retool_mcore.cli.common import tell; tell({LONG!r}, err=True)"
    _, lines = lines_on_terminal([sys.executable, "-c", code], cwd=tmp_path, env={"COLUMNS": columns})
    assert " ".join(lines) == LONG
    assert max(map(len, lines)) <= int(columns) and len(lines) == (3 if columns == "60" else 1)


def test_a_log_has_the_line_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.cli.common import tell

    monkeypatch.setenv("COLUMNS", "60")
    tell(LONG, err=True)
    assert capsys.readouterr().err == f"{LONG}\n"
