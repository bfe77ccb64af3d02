"""`retool score`: compute the reward of the responses in a file."""

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from retool_mcore.cli.common import echo, guarded
from retool_mcore.config.base import is_tables
from retool_mcore.data.files import read_file, write_jsonl
from retool_mcore.data.layouts import NoTruth, UnknownLayout, read_problem, truth_text
from retool_mcore.errors import DataError
from retool_mcore.reward.answer import NUM_CHECKERS
from retool_mcore.reward.score import PAPER, compute_score

app = typer.Typer()
ROWS_AT_ONCE = 1024
TRUTH_COLUMNS = ("truth", "ground_truth")  # column in an evaluation's samples, in a run's trajectories
NEW_COLUMNS = ("extracted", "correct", "reward", "check_failed")


@app.command()
@guarded
def score(
    source: Annotated[
        Path,
        typer.Argument(help="Rows with a response and its ground truth, samples of an evaluation, or trajectories."),
    ],
    out: Annotated[
        Path, typer.Option(help="JSON lines to write: the rows with extracted, correct, reward and check_failed.")
    ],
    *,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="CPU seconds for one equivalence check.")
    ] = PAPER.timeout_s,
    prefix: Annotated[str, typer.Option(help="Prefix for the names of the new columns.")] = "",
    response: Annotated[str, typer.Option(help="Column of the response.")] = "response",
    answer: Annotated[
        str, typer.Option(help="Column of the ground truth; by default, where `retool data rl` looks for it.")
    ] = "",
) -> None:
    """Score responses as RL does: +1 for an answer equivalent to the truth, -1 otherwise.

    Adds columns to each row. In samples and trajectories, the response is the text of all turns.
    """
    counts = {"rows": 0, "correct": 0, "without answer": 0, "failed checks": 0, "without truth": 0}

    def score(numbered: tuple[int, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        index, (where, row) = numbered
        found = find_texts(row, where, response, answer)
        return score_row(row, where, index, *found, timeout_s=timeout_s, prefix=prefix)

    def scored() -> Iterator[dict[str, Any]]:
        rows = enumerate(read_file(source))
        with ThreadPoolExecutor(2 * NUM_CHECKERS) as pool:
            while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
                for result in pool.map(score, chunk):
                    counts["rows"] += 1
                    judged = result[f"{prefix}correct"] is not None
                    counts["correct"] += bool(result[f"{prefix}correct"])
                    counts["without answer"] += judged and result[f"{prefix}extracted"] is None
                    counts["without truth"] += not judged
                    counts["failed checks"] += result[f"{prefix}check_failed"]
                    yield result
        if not counts["rows"]:
            raise DataError(f"{source}: the file has no rows")

    write_jsonl(out, scored())
    typer.echo(", ".join(f"{value} {name}" for name, value in counts.items() if value or name != "without truth"))


def find_texts(row: dict[str, Any], where: str, response: str, answer: str) -> tuple[str, str]:
    """Return the response and the ground truth of a row; the truth is "" if the row has none.

    Raises DataError with file, line and column.
    """
    turns = row.get("turns")
    if response not in row and is_tables(turns):
        text: Any = "\n".join(str(turn.get("text", "")) for turn in turns)
        answer = answer or next((name for name in TRUTH_COLUMNS if name in row), "")
    elif response in row:
        text = row[response]
    else:
        raise DataError(
            f"{where}: no column {response}; it has {', '.join(row) or 'none'}. Set --response to the column"
        )
    if not isinstance(text, str):
        raise DataError(f"{where}, column {response}: {text!r:.80} is not a string. Correct the row, or remove it")
    try:
        if not answer:
            with contextlib.suppress(UnknownLayout):
                return text, read_problem(row, where)[1]
        name = answer or "answer"
        if name not in row:
            raise DataError(f"{where}: no column {name}; it has {', '.join(row)}. Set --answer to the column")
        return text, truth_text(row[name], f"{where}, column {name}")
    except NoTruth:
        return text, ""


def score_row(
    row: dict[str, Any], where: str, index: int, text: str, truth: str, *, timeout_s: float, prefix: str
) -> dict[str, Any]:
    """Return the row with ``NEW_COLUMNS``: extracted (null if none), correct, reward, check_failed.

    For a row with an empty truth, print a note and set the first three to null. Raises DataError if
    the row already has one of the new columns.
    """
    if taken := [prefix + column for column in NEW_COLUMNS if prefix + column in row]:
        raise DataError(
            f"{where}: the row already has a column {', '.join(taken)}. Give the new columns a prefix: --prefix score_"
        )
    if not truth:
        echo(f"{where}: the ground truth is empty, so the row is not scored", err=True)
        return row | dict(zip((prefix + column for column in NEW_COLUMNS), (None, None, None, False), strict=True))
    reward = PAPER.model_copy(update={"timeout_s": timeout_s})
    verdict = compute_score(where, text, truth, {"index": index}, reward=reward)
    values = (
        verdict["extracted"] if verdict["has_answer"] else None,
        bool(verdict["acc"]),
        verdict["score"],
        bool(verdict["check_failed"]),
    )
    return row | {prefix + column: value for column, value in zip(NEW_COLUMNS, values, strict=True)}
