"""Compares two evaluations of the same problems: paired difference, interval, flipped problems.

Pairing removes the variance of the problems' difficulty, which causes most of the uncertainty of a
mean over few problems. The interval of the difference is therefore narrower than the two single
intervals suggest.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, StrictBool

from retool_mcore.errors import DataError
from retool_mcore.evaluate.stats import interval

REPORT = "report.json"
SHOWN_FLIPS = 10
SOLVED = 0.5  # a problem counts as solved if more than this share of its samples is correct


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A problem that exactly one of the two evaluations solved (see SOLVED)."""

    id: int
    truth: str
    first: str  # "7/8": correct samples / all samples
    second: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The second evaluation relative to the first.

    ``difference``: the second's mean@k minus the first's. ``gained`` and ``lost``: problems that
    only the second, or only the first, solved.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    problems: int
    gained: tuple[Flip, ...]
    lost: tuple[Flip, ...]


class _Problem(BaseModel):
    id: int
    truth: str
    correct: Annotated[list[StrictBool], Field(min_length=1)]


class _Report(BaseModel):
    per_problem: Annotated[list[_Problem], Field(min_length=1)]


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.json, given its path or folder, or the folder of an evaluation with one.

    Raises DataError if it is missing.
    """
    file = path / REPORT if path.is_dir() else path
    inner = sorted(path.glob(f"*/{REPORT}"))
    if not file.exists() and len(inner) == 1:
        file = inner[0]
    try:
        text = file.read_text(encoding="utf-8")
        _Report.model_validate_json(text)
    except OSError as error:
        inside = (
            f". Name one of its folders with a report: {', '.join(each.parent.name for each in inner)}" if inner else ""
        )
        raise DataError(f"{file}: cannot be read as a report of `retool eval`: {error.strerror}{inside}") from error
    except ValueError as error:
        raise DataError(
            f"{file}: not a report of `retool eval`: it has no per_problem with id, truth and correct"
        ) from error
    return json.loads(text)


def _by_id(report: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    return {row["id"]: row for row in report["per_problem"]}


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Comparison:
    """Compare the second report with the first. Raises DataError if their problems differ."""
    before, after = _by_id(first), _by_id(second)
    if before.keys() != after.keys():
        only = [sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())]
        raise DataError(
            f"the evaluations have different problems: {len(only[0])} are only in the first ({only[0][:5]}), "
            f"{len(only[1])} only in the second ({only[1][:5]})"
        )
    for id_, row in before.items():
        if row["truth"] != after[id_]["truth"]:
            raise DataError(
                f"the evaluations have different problems: the truth of problem {id_} is {row['truth']!r} in the "
                f"first, {after[id_]['truth']!r} in the second"
            )
    shares = np.array([[fmean(rows[id_]["correct"]) for id_ in before] for rows in (before, after)])
    differences = shares[1] - shares[0]
    low, high = interval(differences)
    flips: dict[bool, list[Flip]] = {True: [], False: []}  # solved by the second?
    for id_, old_share, new_share in zip(before, *shares, strict=True):
        if (old_share > SOLVED) != (new_share > SOLVED):
            counts = {"first": _count(before[id_]), "second": _count(after[id_])}
            flips[bool(new_share > SOLVED)].append(Flip(id=id_, truth=before[id_]["truth"], **counts))
    return Comparison(
        first=float(shares[0].mean()),
        second=float(shares[1].mean()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        problems=len(before),
        gained=tuple(flips[True]),
        lost=tuple(flips[False]),
    )


def _count(row: Mapping[str, Any]) -> str:
    return f"{sum(row['correct'])}/{len(row['correct'])}"


def comparison_lines(result: Comparison) -> Iterator[str]:
    """The difference, and the first SHOWN_FLIPS flipped problems of each direction, as text."""
    yield (
        f"{result.first:.3f} to {result.second:.3f}: {result.difference:+.3f}, 95 % interval {result.low:+.3f} to "
        f"{result.high:+.3f}, paired over {result.problems} problems"
    )
    if result.low <= 0 <= result.high:
        yield "The interval contains 0: the difference may be chance."
    yield f"Only the second solves {len(result.gained)} problems; only the first solves {len(result.lost)}."
    for sign, flips in (("+", result.gained), ("-", result.lost)):
        for flip in flips[:SHOWN_FLIPS]:
            yield f"  {sign} problem {flip.id} (truth {flip.truth:.60}): {flip.first} right, then {flip.second}"
        if len(flips) > SHOWN_FLIPS:
            yield f"  {sign} {len(flips) - SHOWN_FLIPS} more; --out FILE.json writes all of them"
