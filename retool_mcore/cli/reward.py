"""`retool score`: compute the reward of responses in a file."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from retool_mcore.cli.common import guarded, tell
from retool_mcore.data.files import column_names, read_jsonl, read_rows, write_jsonl
from retool_mcore.errors import DataError
from retool_mcore.reward.answer import NUM_CHECKERS
from retool_mcore.reward.score import PAPER, compute_score

app = typer.Typer()
ROWS_AT_ONCE = 1024
NEW_COLUMNS = ("extracted", "correct", "reward", "check_failed")


@app.command()
@guarded
def score(
    source: Annotated[Path, typer.Argument(help='JSON lines or parquet {"response", "answer"}; other keys are kept.')],
    out: Annotated[
        Path, typer.Option(help="The same rows as JSON lines, with extracted, correct, reward and check_failed.")
    ],
    timeout_s: Annotated[float, typer.Option(min=0.001, help="CPU time of one equivalence check.")] = PAPER.timeout_s,
    prefix: Annotated[str, typer.Option(help="Stands before the names of the new columns.")] = "",
) -> None:
    """Score responses as RL does: +1 for an answer equivalent to the truth, -1 otherwise."""
    counts = {"rows": 0, "correct": 0, "without answer": 0, "checks given up": 0, "without truth": 0}

    def score(numbered: tuple[int, dict[str, Any]]) -> dict[str, Any]:
        return score_row(source, *numbered, timeout_s=timeout_s, prefix=prefix)

    def scored() -> Iterator[dict[str, Any]]:
        rows = _rows(source)
        with ThreadPoolExecutor(2 * NUM_CHECKERS) as pool:
            while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
                for result in pool.map(score, chunk):
                    counts["rows"] += 1
                    judged = result[f"{prefix}correct"] is not None
                    counts["correct"] += bool(result[f"{prefix}correct"])
                    counts["without answer"] += judged and result[f"{prefix}extracted"] is None
                    counts["without truth"] += not judged
                    counts["checks given up"] += result[f"{prefix}check_failed"]
                    yield result
        if not counts["rows"]:
            raise DataError(f"{source}: the file has no rows")

    write_jsonl(out, scored())
    typer.echo(", ".join(f"{value} {name}" for name, value in counts.items() if value or name != "without truth"))


def _rows(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers of parquet, from 0, or line numbers, with the rows. Raises DataError."""
    return read_rows(source, column_names(source)) if source.suffix == ".parquet" else read_jsonl(source)


def score_row(source: Path, line: int, row: dict[str, Any], *, timeout_s: float, prefix: str) -> dict[str, Any]:
    """The row with ``NEW_COLUMNS`` added: extracted (null if none), correct, reward, check_failed.

    A row whose answer is empty is told and not judged: the first three are null.
    Raises DataError naming file, line and column, also where the row has one of the new columns.
    """
    where = f"{source}, {'row' if source.suffix == '.parquet' else 'line'} {line}"
    if taken := [prefix + column for column in NEW_COLUMNS if prefix + column in row]:
        raise DataError(
            f"{where}: the row has a column {', '.join(taken)} of its own, which the score would "
            "overwrite. Put a word before the new columns: --prefix score_"
        )
    for column, kinds in (("response", str), ("answer", str | int | float)):
        if column not in row:
            raise DataError(f"{where}: no column {column}; it has {', '.join(row) or 'none'}")
        value = row[column]
        if not isinstance(value, kinds) or isinstance(value, bool) or value != value:  # noqa: PLR0124  NaN is no answer
            raise DataError(f"{where}, column {column}: {value!r:.80} is no {column}. Correct the row, or leave it out")
    if isinstance(row["answer"], str) and not row["answer"].strip():
        tell(f"{where}, column answer: it is empty, so the row is not judged", err=True)
        return row | dict(zip((prefix + column for column in NEW_COLUMNS), (None, None, None, False), strict=True))
    reward = PAPER.model_copy(update={"timeout_s": timeout_s})
    verdict = compute_score(str(source), row["response"], row["answer"], {"index": line}, reward=reward)
    values = (
        verdict["answer"] if verdict["has_answer"] else None,
        bool(verdict["acc"]),
        verdict["score"],
        bool(verdict["check_failed"]),
    )
    return row | {prefix + column: value for column, value in zip(NEW_COLUMNS, values, strict=True)}
