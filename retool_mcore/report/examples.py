"""Example trajectories of problems that were wrong before a run and right after it.

They come from samples.jsonl of the evaluations before and after; the problem's text comes from the
evaluated file, if it still exists. For a run without evaluations, they come from its first and last
recorded validations.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from retool_mcore.report.document import Block, Code, ReportSection, Text
from retool_mcore.report.evaluations import BeforeAfter, Evaluation, trained_with_tool
from retool_mcore.report.record import RunRecord
from retool_mcore.report.view.sources import RecordRow, open_source

SAMPLES = "samples.jsonl"
SHOWN = 3
CHOICE = (
    "These examples are selected, not typical: each problem has a wrong sample {before} and a right one {after}. "
    "Problems with a tool call come first; each problem is shown once."
)
NONE = (
    f"No examples. They need {SAMPLES} of evaluations before and after, or two recorded validations, with a problem "
    "that was wrong before and right after."
)
Record = dict[str, Any]


def examples(runs: Sequence[tuple[str, RunRecord]], evaluated: Sequence[Sequence[BeforeAfter]]) -> ReportSection:
    """Show examples of one run. Order of preference: RL with the tool, RL without it, SFT."""
    ranked = sorted(
        zip(runs, evaluated, strict=True),
        key=lambda each: (each[0][1].kind != "rl", not trained_with_tool(each[0][1])),
    )
    notes: list[Block] = []
    ways: tuple[Callable[..., list[Block]], ...] = (_of_evaluations, _of_validations)
    for way in ways:
        for (label, run), pairs in ranked:
            try:
                blocks = way(label, run, pairs)
            except DataError as error:
                notes.append(Text(text=f"{label}: {error}", quiet=True))
                continue
            if blocks:
                return ReportSection(title="Trajectories before and after", blocks=[*blocks, *notes])
    return ReportSection(title="Trajectories before and after", blocks=[Text(text=NONE, quiet=True), *notes])


def _of_evaluations(label: str, run: RunRecord, pairs: Sequence[BeforeAfter]) -> list[Block]:
    for pair in pairs:
        before, after = pair.before, pair.after
        if before is None or after is None:
            continue
        folders = before.path.parent, after.path.parent
        if not all((folder / SAMPLES).is_file() for folder in folders):
            continue
        wrong, right = (open_source(folder).rows for folder in folders)
        blocks: list[Block] = []
        found = _examples(wrong, right, lambda row, _: row.group)
        for number, (problem, was, now) in enumerate(found, start=1):
            blocks += [
                Text(text=f"{label}, example {number}: problem {problem}, {after.description}."),
                Code(title="The problem", text=_problem(after, int(problem))),
                *_trajectory("Before, wrong", was),
                *_trajectory("After, right", now),
            ]
        if blocks:
            choice = CHOICE.format(before="before the run", after="after it")
            return [Text(text=choice, quiet=True), *blocks]
    return []


def _of_validations(label: str, run: RunRecord, _: Sequence[BeforeAfter]) -> list[Block]:
    if run.kind != "rl":
        return []
    rows = [row for row in open_source(run.path).rows if row.partition == "val"]
    if not rows:
        return []
    first, last = min(row.step for row in rows), max(row.step for row in rows)
    wrong, right = ([row for row in rows if row.step == step] for step in (first, last))
    blocks: list[Block] = []
    for number, (prompt, was, now) in enumerate(
        _examples(wrong, right, lambda _, record: record.get("prompt")), start=1
    ):
        blocks += [
            Text(text=f"{label}, example {number}: validation of step {first}, then of step {last}."),
            Code(title="The problem, as the model read it", text=prompt),
            *_trajectory(f"Step {first}, wrong", was),
            *_trajectory(f"Step {last}, right", now),
        ]
    choice = CHOICE.format(before="in the run's first recorded validation", after="in its last")
    return [Text(text=choice, quiet=True), *blocks] if blocks and first < last else []


def _examples(
    before: Iterable[RecordRow], after: Iterable[RecordRow], problem_of: Callable[[RecordRow, Record], Any]
) -> list[tuple[str, Record, Record]]:
    """Return (problem, wrong record before, right record after) of at most SHOWN problems."""
    wrongs = _by_problem((row for row in before if row.right is False), problem_of)
    rights = _by_problem((row for row in after if row.right), problem_of)
    problems = sorted((each for each in rights if each in wrongs), key=lambda each: not _calls(rights[each]))
    return [(problem, wrongs[problem], rights[problem]) for problem in problems[:SHOWN]]


def _by_problem(rows: Iterable[RecordRow], problem_of: Callable[[RecordRow, Record], Any]) -> dict[str, Record]:
    """Return one record per problem: the first with a call, or else the first."""
    found: dict[str, Record] = {}
    for row in rows:
        record = row.load()
        problem = problem_of(row, record)
        if isinstance(problem, str) and (problem not in found or (_calls(record) and not _calls(found[problem]))):
            found[problem] = record
    return found


def _calls(record: Record) -> bool:
    return any(turn.get("results") for turn in record["turns"])


def _problem(evaluation: Evaluation, id_: int) -> str:
    """Return the problem as the model received it."""
    paths = [Path(path) for path in evaluation.key[0].split(", ")]
    try:
        found = next((each for each in read_problems(paths, id_ + 1) if each.id == id_), None)
    except DataError:
        found = None
    if found is None:
        return f"(The problem's text is missing, because {evaluation.key[0]} cannot be read.)"
    return "\n".join(str(message["content"]) for message in found.messages)


def _trajectory(title: str, record: Record) -> list[Block]:
    """Show a trajectory: text of each turn, executed code with its output, and the answer."""
    blocks: list[Block] = []
    for number, turn in enumerate(record["turns"], start=1):
        blocks.append(Code(title=f"{title}: turn {number}", text=str(turn.get("text", ""))))
        for result in turn.get("results") or ():
            blocks.append(Code(title="Code that ran", text=str(result.get("code", ""))))
            failure = "" if result.get("ok") else f" ({result.get('status', 'failed')}, with an error)"
            blocks.append(Code(title=f"Output{failure}", text=str(result.get("shown", ""))))
    answer = record.get("extracted")
    answered = "no answer" if answer is None else f"answer {answer}"
    stop = record.get("stop_reason", "?")
    blocks.append(Text(text=f"{title}: {answered}; the truth is {record.get('truth', '')}. Stop reason: {stop}."))
    return blocks
