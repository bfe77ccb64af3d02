r"""Converts RL problems from common data sets to verl's schema and removes duplicates.

DAPO-Math-17k has 1.79 million rows: about 17 thousand problems, each about a hundred times. The
conversion therefore streams the rows and keeps only new problems.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from retool_mcore.data.files import ENDINGS, SPLITS, row_split, rows_of_split, split_of
from retool_mcore.data.layouts import OPTIONS, Columns, NoTruth, UnknownLayout, other_roles, read_problem
from retool_mcore.data.leaks import normalised
from retool_mcore.data.prompt_format import PromptFormat
from retool_mcore.data.verify import ConversionReport, Rejected
from retool_mcore.errors import DataError
from retool_mcore.reward.answer import truth_problem

STAGES = ("source", "split", "answer", "length", "repeat")
SHOWN_CHARS = 2000  # recorded characters per text of a reject
SHOWN_CONFLICTS = 3


# What to do if no row is left, by the stage that rejected the first one.
REMEDIES = {"split": "Choose another split with --split, or omit it", "length": "Raise --max-prompt-tokens"}


def convert_rl(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    data_source: str,
    split: str = "train",
    *,
    report: ConversionReport | None = None,
    reject_bad: bool = False,
    columns: Columns | None = None,
    wanted: str | None = None,
    prompt_format: PromptFormat | None = None,
    too_long: Callable[[list[dict[str, Any]]], str] = lambda _: "",
) -> ConversionReport:
    """Convert rows (where, row) of any known layout to verl's schema.

    Deduplicates by normalised problem text. ``split``: the split of rows that do not name one.
    ``wanted``: drop rows that name another split; without it, rows of different splits are an
    error. ``prompt_format``: the format of the prompts. ``too_long``: returns why a prompt is too
    long, or "". ``report``: may already contain rejects from reading the file. Raises DataError if
    no row is left or a row is unusable; with ``reject_bad``, an unusable row becomes a reject.
    """
    report = report or ConversionReport()
    report.stages = STAGES
    seen: dict[bytes, bytes] = {}
    conflicts: list[str] = []
    first: Mapping[str, Any] = {}
    chosen = rows_of_split(rows, wanted, unnamed=split, on_other=lambda: report.counts.update(["split"]))
    for where, row in chosen:
        first = first or row
        try:
            problem, truth = read_problem(row, where, columns)
        except NoTruth as error:
            report.reject(where, Rejected("answer", str(error)), {"problem": error.problem[:SHOWN_CHARS]})
            continue
        except DataError as error:
            if reject_bad:
                report.reject_unreadable(where, error)
                continue
            if isinstance(error, UnknownLayout):
                raise
            raise DataError(
                f"{error}. The row's columns: {', '.join(row)}. Choose others with --problem, --answer and "
                "--solution-box, or leave such rows out with --reject-bad, which records the reason"
            ) from error
        key, answer = _digest(normalised(problem)), _digest(truth)
        if seen.get(key) == answer:
            report.counts["repeat"] += 1  # not recorded: DAPO-Math-17k has each problem a hundred times
            continue
        try:
            if key in seen:
                conflicts.append(where)
                raise Rejected("repeat", "an earlier row has the same problem with a different answer")
            if why := truth_problem(truth):
                raise Rejected("answer", why)
            place = data_source, row_split(row) or split, len(report.rows)
            made = rl_row(problem, truth, *place, prompt_format=prompt_format)
            if why := too_long(made["prompt"]):
                raise Rejected("length", why)
        except Rejected as rejected:
            report.reject(where, rejected, {"problem": problem[:SHOWN_CHARS], "truth": truth[:SHOWN_CHARS]})
            continue
        seen[key] = answer
        report.rows.append(made)
        for role in other_roles(row, columns):
            report.notes[f"rows whose {role} turns are dropped (RL on a file in verl's schema keeps them)"] += 1
    if not report.rows:
        first_stage = "split" if report.counts["split"] else report.rejects[0]["stage"] if report.rejects else ""
        raise report.nothing_left(first, REMEDIES.get(first_stage, OPTIONS))
    if conflicts:
        places = "; ".join(conflicts[:SHOWN_CONFLICTS])
        report.notes[f"repeats with a different answer; the first row is kept ({places})"] = len(conflicts)
    return report


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def rl_row(
    problem: str, truth: str, data_source: str, split: str, index: int, *, prompt_format: PromptFormat | None = None
) -> dict[str, Any]:
    """A row in verl's RL schema. By default, the prompt asks for a boxed answer."""
    return {
        "data_source": data_source,
        "prompt": (prompt_format or PromptFormat()).messages(problem),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


def name_and_split(source: str) -> tuple[str, str]:
    """Derive data_source and split from a path or hub name: gsm8k/test.jsonl -> "gsm8k", "test"."""
    path = Path(source)
    ending = max((suffix for suffix in ENDINGS if path.name.endswith(suffix)), key=len, default="")
    stem = path.name.removesuffix(ending)
    split = split_of(stem) or "train"
    return (path.absolute().parent.name or stem, split) if stem in SPLITS else (stem or source, split)
