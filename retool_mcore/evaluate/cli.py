"""`retool eval`: score models on a file of problems."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from retool_mcore.cli import guarded
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from retool_mcore.evaluate.cases import Case

app = typer.Typer()

WIDTH_OF_A_LOG = 120


@app.callback()
def evaluation() -> None:
    """Score models on a file of problems."""


@app.command("eval")
@guarded
def evaluate(
    config: Annotated[Path, typer.Argument(help="the RL configuration whose rollout, sandbox and platform are used")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    model: Annotated[list[str], typer.Option(help="a model directory, or NAME=DIRECTORY; may be repeated")],
    data: Annotated[Path, typer.Option(help="parquet of verl's schema, or JSON lines {problem, answer}")],
    out: Annotated[Path, typer.Option(help="samples and reports; an evaluation found here is continued")],
    n: Annotated[int, typer.Option(min=1, help="samples of each problem")] = 8,
    tool: Annotated[Literal["on", "off", "both"], typer.Option(help="with the interpreter, without, or each")] = "on",
    limit: Annotated[int | None, typer.Option(min=1, help="only the first problems of the file")] = None,
    url: Annotated[str | None, typer.Option(help="a running SGLang server that holds the model")] = None,
) -> None:
    """Sample each problem n times: mean@n with its interval, best@n, maj@n, worst@n, pass@n, behaviour.

    Models are scored one after the other; those of one architecture share a server. Run again to continue.
    """
    from retool_mcore.evaluate.cases import evaluate_many

    run = load_config(RlConfig, config, overrides or ())
    cases = _cases(model, tool)
    with _Bars(cases) as bars:
        reports = evaluate_many(
            run, cases, data=data, out=out, n=n, limit=limit, url=url, on_start=bars.start, on_sample=bars.advance
        )
    _show(reports)


def _cases(models: list[str], tool: str) -> list[Case]:
    from retool_mcore.evaluate.cases import Case

    cases: list[Case] = []
    for text in models:
        name, sign, path = text.partition("=")
        name, path = (name, path) if sign else (Path(text).name or "model", text)
        if tool in ("on", "both"):
            cases.append(Case(name=name, model=path))
        if tool in ("off", "both"):
            cases.append(Case(name=f"{name}_text" if tool == "both" else name, model=path, tool=False))
    names = [case.name for case in cases]
    if double := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"several models are called {', '.join(sorted(double))}. Give names: --model NAME=DIRECTORY")
    return cases


class _Bars:
    """One progress bar for each evaluation, with the share of right answers so far."""

    def __init__(self, cases: list[Case]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress: Progress = Progress(*columns, TextColumn("{task.fields[right]}"))
        self._tasks = {case.name: self._progress.add_task(case.name, total=None, right="") for case in cases}
        self._right = {case.name: 0 for case in cases}
        self._new = {case.name: 0 for case in cases}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *exit_arguments: object) -> None:
        self._progress.stop()

    def start(self, name: str, finished: int, total: int) -> None:
        self._progress.update(self._tasks[name], total=total, completed=finished)

    def advance(self, name: str, correct: bool) -> None:
        self._right[name] += correct
        self._new[name] += 1
        share = f"{self._right[name] / self._new[name]:.3f} right"
        self._progress.update(self._tasks[name], advance=1, right=share)


def _show(reports: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    n = next(iter(reports.values()))["n"]
    table = Table()
    columns = {
        f"mean@{n}": "{:.3f}",
        **({f"{kind}@{n}": "{:.3f}" for kind in ("best", "maj", "worst")} if n > 1 else {}),
    }
    for heading in ("model", "tool", *columns, "95 % of mean", "turns", "calls", "tokens"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, report in reports.items():
        scores, behavior = report["scores"], report["behavior"]
        table.add_row(
            name,
            "on" if report["tool"] else "off",
            *(form.format(scores[column]) for column, form in columns.items()),
            f"{scores[f'mean@{n}/low']:.3f} to {scores[f'mean@{n}/high']:.3f}",
            f"{behavior['behavior/turns']:.2f}",
            f"{behavior['behavior/calls']:.2f}",
            f"{behavior['behavior/response_tokens']:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_LOG)
    console.print(table)
