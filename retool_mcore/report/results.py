"""Report sections on evaluations: before and after a run, and between two runs."""

from collections.abc import Callable, Sequence

from retool_mcore.evaluate.compare import Comparison, Flip
from retool_mcore.report.document import Block, ReportSection, Table, Text
from retool_mcore.report.evaluations import BeforeAfter, Evaluation, between_runs
from retool_mcore.report.numbers import share, signed
from retool_mcore.report.record import Row, RunRecord

MISSING = "not evaluated"
FLIPS_SHOWN = 8
WHAT_INTERVALS_ARE = (
    "Intervals are 95 % bootstrap intervals over the problems; those of differences are paired by problem. "
    "A difference whose interval holds 0 may be chance."
)

VALIDATION_NOTE = (
    "By the run itself, on its own held-out problems. Intervals are 95 %, for other problems of the kind; those of two "
    "validations are of the same problems, so a difference is surer than they look: `retool eval` pairs them."
)


def before_after(
    labelled: Sequence[tuple[str, RunRecord]], evaluated: Sequence[Sequence[BeforeAfter]], notes: Sequence[str]
) -> ReportSection:
    """Section comparing each run's initial and trained model, followed by its validations."""
    rows: list[tuple[str, ...]] = []
    blocks: list[Block] = []
    marked: set[int] = set()
    for (label, _), pairs in zip(labelled, evaluated, strict=True):
        for index, pair in enumerate(pairs):
            one = pair.after or pair.before
            assert one is not None, "a pair holds at least one evaluation"
            if index == 0:
                marked.add(len(rows))
            rows.append((label, one.words, _mean(pair.before), _mean(pair.after), _change(pair)))
        if not pairs:
            text = (
                f"{label}: no evaluation of its export, or of the model it started from, was found: see `retool eval`."
            )
            blocks.append(Text(text=text, quiet=True))
    if rows:
        head = ("run", "problems", "before", "after", "difference")
        blocks = [Table(head=head, rows=rows, numbers_from=2, marked=frozenset(marked)), *blocks]
        blocks.append(Text(text=WHAT_INTERVALS_ARE, quiet=True))
    blocks += [*validations(labelled), *(Text(text=note, quiet=True) for note in notes)]
    return ReportSection(title="Before and after", blocks=blocks)


def _mean(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return MISSING
    value, low, high = evaluation.mean
    return f"{share(value)} ({_ends(low, high, share)})"


def _change(pair: BeforeAfter) -> str:
    if pair.change is not None:
        return _difference(pair.change)
    return "not the same problems" if pair.before and pair.after else ""


def _difference(found: Comparison) -> str:
    return f"{signed(found.difference)} ({_ends(found.low, found.high, signed)})"


def _ends(low: float, high: float, words: Callable[[float], str]) -> str:
    return f"{words(low)} to {words(high)}"


def validated(run: RunRecord) -> list[Row]:
    return [row for row in run.rows if "val/accuracy" in row]


def with_interval(row: Row) -> str:
    low, high = row.get("val/accuracy/low"), row.get("val/accuracy/high")
    interval = "" if low is None or high is None else f" ({share(low)} to {share(high)})"
    return f"{share(row['val/accuracy'])}{interval}"


def validations(labelled: Sequence[tuple[str, RunRecord]]) -> list[Block]:
    """Table of validation accuracies; empty if no run validated."""
    found = [(label, validated(run)) for label, run in labelled]
    rows = [
        (label, *(f"step {int(row['step'])}: {with_interval(row)}" for row in (each[0], each[-1])), _best(each))
        for label, each in found
        if each
    ]
    if not rows:
        return []
    return [
        Table(head=("validation's accuracy", "first", "last", "best"), rows=rows),
        Text(text=VALIDATION_NOTE, quiet=True),
    ]


def _best(rows: list[Row]) -> str:
    best = max(rows, key=lambda row: row["val/accuracy"])
    return f"step {int(best['step'])}: {share(best['val/accuracy'])}"


def between(labels: Sequence[str], kinds: Sequence[str], evaluated: Sequence[Sequence[BeforeAfter]]) -> ReportSection:
    """Section comparing every two runs' models on the same problems."""
    pairings = between_runs(labels, kinds, evaluated)
    if not pairings:
        text = "No two runs of a kind have evaluations of the same problems, so nothing can be paired."
        return ReportSection(title="Run against run", blocks=[Text(text=text, quiet=True)])
    rows = [
        (
            f"{each.first}, then {each.second}",
            each.words,
            share(each.found.first),
            share(each.found.second),
            _difference(each.found),
            f"{len(each.found.gained)} / {len(each.found.lost)}",
        )
        for each in pairings
    ]
    head = ("runs", "problems", "first", "second", "difference", "gained / lost")
    blocks: list[Block] = [Table(head=head, rows=rows, numbers_from=2)]
    first = pairings[0]
    for words, flips in (("solves", first.found.gained), ("no longer solves", first.found.lost)):
        if flips:
            blocks.append(Text(text=f"{first.second} {words}, other than {first.first}: {_flips(flips)}.", quiet=True))
    text = "Gained and lost: problems of which more than half of the samples are right in the one run alone."
    return ReportSection(title="Run against run", blocks=[*blocks, Text(text=text, quiet=True)])


def _flips(flips: Sequence[Flip]) -> str:
    shown = [f"problem {flip.id} ({flip.first}, then {flip.second})" for flip in flips[:FLIPS_SHOWN]]
    more = len(flips) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
