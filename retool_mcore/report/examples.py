"""Example trajectories of problems that were wrong before a run and right after it.

They come from samples.jsonl of the two evaluations; the problem's text comes from the evaluated
file, if it still exists. For a run without evaluations, they come from its first and last recorded
validations.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from retool_mcore.config.base import is_table
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from retool_mcore.report.document import Block, Code, ReportSection, Text
from retool_mcore.report.evaluations import BeforeAfter, Evaluation, trained_with_tool
from retool_mcore.report.record import RunRecord
from retool_mcore.report.view.sources import open_source

SAMPLES = "samples.jsonl"
SHOWN = 3
TITLE = "Trajectories before and after"
HOW_CHOSEN = (
    "Chosen, not typical: samples that were wrong before the run and right after it. Those that call the tool come "
    "first where the run had it, then the lowest problem and sample; each problem is shown once."
)
OF_VALIDATIONS = (
    "Chosen, not typical: problems of the run's first recorded validation that were wrong there and right in its last. "
    "Those that call the tool come first; each problem is shown once."
)
Place = tuple[int, int]  # problem and sample


def examples(
    labels: Sequence[str], runs: Sequence[RunRecord], evaluated: Sequence[Sequence[BeforeAfter]]
) -> ReportSection:
    """Show examples of one run. Order of preference: RL with the tool, RL without it, SFT."""
    ranked = sorted(zip(labels, runs, evaluated, strict=True), key=lambda each: _rank(each[1]))
    notes: list[Block] = []
    for label, run, pairs in ranked:
        for pair in pairs:
            if pair.before is None or pair.after is None or pair.change is None:
                continue
            try:
                blocks = _of_pair(label, pair.before, pair.after, prefer_calls=trained_with_tool(run))
            except DataError as error:
                notes.append(Text(text=f"{label}: {error}", quiet=True))
                continue
            if blocks:
                return ReportSection(title=TITLE, blocks=[Text(text=HOW_CHOSEN, quiet=True), *blocks, *notes])
    for label, run, _ in ranked:
        try:
            blocks = _of_validations(label, run)
        except DataError as error:
            notes.append(Text(text=f"{label}: {error}", quiet=True))
            continue
        if blocks:
            return ReportSection(title=TITLE, blocks=[Text(text=OF_VALIDATIONS, quiet=True), *blocks, *notes])
    text = (
        f"None: they need {SAMPLES} of evaluations before and after, or two recorded validations, with a problem "
        "wrong before and right after."
    )
    return ReportSection(title=TITLE, blocks=[Text(text=text, quiet=True), *notes])


def _rank(run: RunRecord) -> tuple[bool, bool]:
    return run.kind != "rl", not trained_with_tool(run)


def _of_pair(label: str, before: Evaluation, after: Evaluation, *, prefer_calls: bool) -> list[Block]:
    files = before.path.parent / SAMPLES, after.path.parent / SAMPLES
    if not all(file.is_file() for file in files):
        return []
    wanted = _mended(before, after)
    rights = dict(_rows(files[1], wanted))
    places = sorted(rights, key=lambda place: (prefer_calls and not _calls(rights[place]), place))
    chosen: dict[int, Place] = {}
    for place in places:
        chosen.setdefault(place[0], place)
    shown = list(chosen.values())[:SHOWN]
    wrongs = dict(_rows(files[0], set(shown)))
    blocks: list[Block] = []
    for number, place in enumerate((each for each in shown if each in wrongs), start=1):
        blocks.append(Text(text=f"{label}, example {number}: problem {place[0]}, sample {place[1]}, {after.words}."))
        blocks.append(Code(title="The problem", text=_asked(after, place[0])))
        truth = str(rights[place].get("truth", ""))
        blocks += _trajectory("Before, wrong", wrongs[place], truth)
        blocks += _trajectory("After, right", rights[place], truth)
    return blocks


def _of_validations(label: str, run: RunRecord) -> list[Block]:
    """Show problems that are wrong in the first recorded validation and right in the last one."""
    if run.kind != "rl":
        return []
    rows = [row for row in open_source(run.path).rows if row.partition == "val"]
    steps = sorted({row.step for row in rows})
    if len(steps) < 2:
        return []
    wrongs = _by_prompt(row.load() for row in rows if row.step == steps[0] and row.right is False)
    rights = _by_prompt(row.load() for row in rows if row.step == steps[-1] and row.right)
    prompts = sorted(wrongs.keys() & rights.keys(), key=lambda prompt: (not _calls(rights[prompt]), prompt))
    blocks: list[Block] = []
    for number, prompt in enumerate(prompts[:SHOWN], start=1):
        blocks.append(Text(text=f"{label}, example {number}: validation of step {steps[0]}, then of step {steps[-1]}."))
        blocks.append(Code(title="The problem, as the model read it", text=prompt))
        truth = str(rights[prompt].get("truth", ""))
        blocks += _trajectory(f"Step {steps[0]}, wrong", wrongs[prompt], truth)
        blocks += _trajectory(f"Step {steps[-1]}, right", rights[prompt], truth)
    return blocks


def _by_prompt(records: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return one record per prompt: the first with a call, or else the first."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        prompt = record.get("prompt")
        if isinstance(prompt, str) and (prompt not in found or (_calls(record) and not _calls(found[prompt]))):
            found[prompt] = record
    return found


def _mended(before: Evaluation, after: Evaluation) -> set[Place]:
    """Return the (problem, sample) pairs that are wrong before and right after."""
    earlier = {row["id"]: row["correct"] for row in before.report["per_problem"]}
    return {
        (row["id"], sample)
        for row in after.report["per_problem"]
        for sample, (was, now) in enumerate(zip(earlier.get(row["id"], ()), row["correct"], strict=False))
        if now and not was
    }


def _rows(file: Path, wanted: set[Place]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the ``wanted`` rows of a samples.jsonl, line by line. Raises DataError if damaged."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # truncated by a kill during a write
            try:
                row = json.loads(line)
                place = row["problem"], row["sample"]
                if not isinstance(row["turns"], list):
                    raise TypeError("turns")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f"{file}, line {number}: not a sample of `retool eval`") from error
            if place in wanted:
                yield place, row


def _turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn for turn in cast("list[object]", row["turns"]) if is_table(turn)]


def _results(turn: dict[str, Any]) -> list[dict[str, Any]]:
    found: Any = turn.get("results")
    return [each for each in cast("list[object]", found) if is_table(each)] if isinstance(found, list) else []


def _calls(row: dict[str, Any]) -> bool:
    return any(_results(turn) for turn in _turns(row))


def _asked(evaluation: Evaluation, id_: int) -> str:
    """Return the problem as the model received it."""
    paths = [Path(path) for path in evaluation.key[0].split(", ")]
    try:
        found = next((each for each in read_problems(paths, id_ + 1) if each.id == id_), None)
    except DataError:
        found = None
    if found is None:
        return f"(its text is not there: {evaluation.key[0]} cannot be read)"
    return "\n".join(str(message["content"]) for message in found.messages)


def _trajectory(title: str, row: dict[str, Any], truth: str) -> list[Block]:
    """Show a trajectory: text of each turn, executed code with its output, and the answer."""
    blocks: list[Block] = []
    for number, turn in enumerate(_turns(row), start=1):
        blocks.append(Code(title=f"{title}: turn {number}", text=str(turn.get("text", ""))))
        for result in _results(turn):
            blocks.append(Code(title="Code that ran", text=str(result.get("code", ""))))
            ended = "" if result.get("ok") else f" ({result.get('status', 'failed')}, with an error)"
            blocks.append(Code(title=f"Its output{ended}", text=str(result.get("shown", ""))))
    answer = row.get("extracted")
    given = "no answer" if answer is None else f"answer {answer}"
    blocks.append(Text(text=f"{title}: {given}; the truth is {truth}. It ended by {row.get('stop_reason', '?')}."))
    return blocks
