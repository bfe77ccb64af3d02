"""Assembles a report and writes it as one HTML file, or as Markdown plus a folder of SVG files."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from retool_mcore.errors import ConfigError
from retool_mcore.report import facts, sections
from retool_mcore.report.comparisons import before_and_after_section, models_section, validation_rows
from retool_mcore.report.document import (
    Picture,
    Pictures,
    Report,
    ReportSection,
    Text,
    Tile,
    Tiles,
    environment,
)
from retool_mcore.report.evaluations import BeforeAfter, all_reports, before_and_after
from retool_mcore.report.numbers import duration, number, share
from retool_mcore.report.record import RunRecord, read_run, state_of
from retool_mcore.report.warnings import warnings_of
from retool_mcore.run.folder import write_atomic
from retool_mcore.run.status import printable

FORMS = (".html", ".md")
NEWEST = 5  # number of last steps averaged for a curve's current value


def write_report(paths: Sequence[Path], out: Path, named_reports: Sequence[Path] = ()) -> list[str]:
    """Write the report of one or more runs to ``out``; return notes on what was left out.

    The suffix of ``out`` (.html or .md) selects the format. Raises DataError for a folder that is
    damaged or not a run's, ConfigError for another suffix.
    """
    if out.suffix not in FORMS:
        raise ConfigError(f"--out {out}: the name must end in {' or '.join(FORMS)}.")
    report, notes = make_report([read_run(path) for path in paths], named_reports)
    if out.suffix == ".html":
        write_atomic(out, environment().get_template("report.html.jinja").render(report=report))
    else:
        _write_markdown(report, out)
    return notes


def _write_markdown(report: Report, out: Path) -> None:
    folder = out.with_name(f"{out.stem}_pictures")
    shutil.rmtree(folder, ignore_errors=True)
    files: dict[int, str] = {}
    for section in report.sections:
        pictures = [picture for block in section.blocks if isinstance(block, Pictures) for picture in block.pictures]
        for index, picture in enumerate(pictures, 1):
            file = folder / f"{section.anchor}_{index}.svg"
            write_atomic(file, picture.svg)
            files[id(picture)] = f"{folder.name}/{file.name}"

    def file_of(picture: Picture) -> str:
        return files[id(picture)]

    text = environment().get_template("report.md.jinja").render(report=report, file_of=file_of)
    write_atomic(out, text)


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """Return the runs' names, or their folders where names are not unique."""
    names = [run.path.name if run.path.name not in ("", ".") else run.name for run in runs]
    return [printable(str(run.path) if names.count(name) > 1 else name) for name, run in zip(names, runs, strict=True)]


def make_report(runs: Sequence[RunRecord], named_reports: Sequence[Path] = ()) -> tuple[Report, list[str]]:
    """Build the report of these runs. Also returns notes on unreadable evaluation reports."""
    labels = labels_of(runs)
    labelled = list(zip(labels, runs, strict=True))
    reports, notes = all_reports(runs, named_reports)
    evaluated = [before_and_after(run, reports) for run in runs]
    shown = [
        ReportSection(
            title="At a glance", blocks=[_tiles(*parts) for parts in zip(labels, runs, evaluated, strict=True)]
        ),
        sections.learning(labelled),
        _warnings(labelled),
    ]
    rest = [
        *([models_section(labelled, evaluated)] if len(runs) > 1 else []),
        before_and_after_section(labelled, evaluated, notes),
        sections.behaviour(labelled),
        sections.dropped(labelled),
        sections.speed(labelled),
        sections.phases(labelled),
        facts.settings(labelled),
        facts.environment(labelled),
    ]
    made = [*shown, *(replace(section, folded=True) for section in rest)]
    title = " and ".join(labels) if len(labels) < 3 else f"{', '.join(labels[:-1])} and {labels[-1]}"
    return Report(title=title, subtitle=_subtitle(runs), sections=made), notes


def _warnings(runs: sections.Labelled) -> ReportSection:
    """Section with the warnings that `retool watch` would show now."""
    now_s = time.time()
    of_runs = [(label, warnings_of(run, state_of(run), now_s)) for label, run in runs]
    blocks = [Text(text=f"{label}: {warning}") for label, warnings in of_runs for warning in warnings]
    return ReportSection(title="Warnings", blocks=blocks or [Text(text="No warnings.", quiet=True)])


def _subtitle(runs: Sequence[RunRecord]) -> str:
    kinds = {"rl": "reinforcement learning", "sft": "supervised fine-tuning"}
    models = dict.fromkeys(str(run.setting("model.path", "an unknown model")) for run in runs)
    methods = ", ".join(dict.fromkeys(kinds[run.kind] for run in runs))
    return f"{methods[:1].upper()}{methods[1:]}, from {' and '.join(models)}"


def _tiles(label: str, run: RunRecord, evaluated: Sequence[BeforeAfter]) -> Tiles:
    state = state_of(run)
    tiles = [Tile(label="steps", value=f"{run.step} of {run.steps}", note=f"{state.name}: {state.stage}")]
    mine = next((pair for pair in evaluated if pair.after or pair.before), None)
    if mine is not None:
        tiles.append(_accuracy_tile(mine))
    elif validations := validation_rows(run):
        last = validations[-1]
        value = " → ".join(
            share(row["val/accuracy"]) for row in ([validations[0], last] if len(validations) > 1 else [last])
        )
        low, high = last.get("val/accuracy/low"), last.get("val/accuracy/high")
        interval = f", 95 %: {share(low)} to {share(high)}" if low is not None and high is not None else ""
        note = f"validation at step {int(last['step'])}{interval}"
        tiles.append(Tile(label="held-out accuracy", value=value, note=note))
    elif run.values("accuracy"):
        newest = run.values("accuracy")[-NEWEST:]
        note = f"mean of the last {len(newest)} steps, on training prompts"
        tiles.append(Tile(label="accuracy", value=share(sum(newest) / len(newest)), note=note))
    metric, word = ("val_loss", "validation loss") if run.values("val_loss") else ("loss", "loss")
    if run.kind == "sft" and run.values(metric):
        first, last = run.values(metric)[0], run.values(metric)[-1]
        tiles.append(Tile(label=word, value=number(last), note=f"nats per token; first value: {number(first)}"))
    rate, mfu = sections.median_after_warmup(run, "tokens_per_s"), sections.median_after_warmup(run, "mfu")
    if rate is not None:
        note = f"MFU {mfu:.1%}" if mfu is not None else ""  # the section "Throughput" explains a missing MFU
        tiles.append(Tile(label="tokens per second", value=number(rate), note=note))
    step_s = sections.median_after_warmup(run, "timing_s/step")
    if step_s is not None:
        tiles.append(Tile(label="time per step", value=duration(step_s), note="median, without validation"))
    return Tiles(title=label, tiles=tiles)


def _accuracy_tile(pair: BeforeAfter) -> Tile:
    means = [share(evaluation.mean[0]) for evaluation in (pair.before, pair.after) if evaluation]
    note = f"{pair.newest.report['problems']} problems, {pair.newest.tool}{'' if pair.after else ', before the run'}"
    return Tile(label="held-out accuracy", value=" → ".join(means), note=note)
