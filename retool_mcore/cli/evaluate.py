"""`retool eval`: score models on a file of problems."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Column

from retool_mcore.cli.common import (
    AnswerColumn,
    BoxColumn,
    ProblemColumns,
    default_command,
    echo,
    guarded,
    wide_console,
)
from retool_mcore.config import load_evaluation
from retool_mcore.errors import ConfigError
from retool_mcore.process import exit_on_sigterm
from retool_mcore.run.status import notes_on

if TYPE_CHECKING:
    from retool_mcore.evaluate.cases import Case


Models = Annotated[
    list[str], typer.Option(help="a model directory, NAME=DIRECTORY, or an SGLang server's URL; may be repeated")
]
DataFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="parquet or JSON lines in any layout that `data rl` reads; validation.files by default; may be repeated",
        show_default=False,
    ),
]
ApiUrl = Annotated[
    str | None, typer.Option(help="an OpenAI-compatible API, https://HOST/v1; --model is then the model's name there")
]
NumSamples = Annotated[
    int | None, typer.Option(min=1, help="samples per problem; validation.n by default", show_default=False)
]


READING = "reading the problems and the model's files"
LINE_EVERY_S = 30.0  # between progress lines when there is no terminal for a bar

app = typer.Typer(cls=default_command("run"), no_args_is_help=True)


@app.callback()
def evaluation() -> None:
    """Score models on a file of problems, and compare two evaluations.

    `run` is the default command and may be left out.
    """


@app.command("run")
@guarded
def evaluate(
    config: Annotated[
        str,
        typer.Argument(help="RL run file with the rollout, sandbox and platform to use", show_default=False),
    ] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    model: Models,
    data: DataFiles = None,
    out: Annotated[Path, typer.Option(help="folder for samples and reports; an evaluation in it is continued")] = Path(
        "runs/eval"
    ),
    n: NumSamples = None,
    protocol: Annotated[str, typer.Option(help="as rollout.protocol; CONFIG's by default")] = "",
    tool: Annotated[Literal["on", "off", "both"], typer.Option(help="with the interpreter, without, or both")] = "on",
    limit: Annotated[int | None, typer.Option(min=1, help="use only the first problems")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="a running SGLang server with the model, http://HOST:PORT or http://:KEY@HOST:PORT"),
    ] = None,
    endpoint: ApiUrl = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="samples in flight; 2 * rollout.max_running_requests by default", show_default=False),
    ] = None,
    problem: ProblemColumns = None,
    answer: AnswerColumn = "",
    solution_box: BoxColumn = "",
) -> None:
    """Sample each problem n times; report scores and behaviour.

    The scores are mean@n with its interval, pass@n and maj@n. Problems, n, temperature and top_p
    come from section [validation] of CONFIG. With --tool both, a model is sampled with and without
    the tool at the same time. Each server uses rollout.engine_tp GPUs. Several models are sampled
    one after the other. Run the same command again to continue. Without CONFIG, the defaults are
    8 turns, 16384 tokens (or the model's maximum), top_p 0.6 and n = 8.

    With --endpoint, the model is behind an API that takes and returns text. Its key is
    OPENAI_API_KEY.
    """
    model, url = _served(model, url, endpoint, protocol)
    if "=" in config and not Path(config).exists():
        config, overrides = "", [config, *(overrides or ())]
    changes = [*(overrides or ()), *([f"rollout.protocol={protocol}"] if protocol else [])]
    cases = _cases(model, tool)
    if not config and not data:
        raise ConfigError("No problems: give CONFIG or --data.")
    run = load_evaluation(config, changes) if config else None
    exit_on_sigterm(ctrl_c=False)
    with _Bars(cases) as bars:
        from retool_mcore.data.layouts import Columns
        from retool_mcore.evaluate.cases import default_config, evaluate_many

        run = run or default_config(cases[0].model, changes, has_files=endpoint is None)
        reports = evaluate_many(
            run,
            cases,
            data=data or (),
            columns=Columns.named(problem, answer, solution_box),
            out=out,
            n=n,
            concurrency=concurrency,
            limit=limit,
            url=url,
            endpoint=endpoint,
            on_start=bars.start,
            on_stage=bars.stage,
            on_sample=bars.advance,
            on_note=bars.note,
        )
    _show(reports)


def _show(reports: dict[str, dict[str, Any]]) -> None:
    from retool_mcore.evaluate.table import interval_note, summary_table

    wide_console().print(summary_table(reports))
    for line in dict.fromkeys(interval_note(report) for report in reports.values()):
        echo(line)


@app.command("compare")
@guarded
def compare_two(
    first: Annotated[Path, typer.Argument(help="a report.json of `retool eval`, or its folder")],
    second: Annotated[Path, typer.Argument(help="another one, of the same problems")],
    out: Annotated[Path | None, typer.Option(help="JSON file to write the comparison to")] = None,
) -> None:
    """Compare two evaluations of the same problems.

    Prints the paired difference, its interval, and the problems that flipped.
    """
    from retool_mcore.data.files import replacing
    from retool_mcore.evaluate.compare import compare, comparison_lines, read_report

    reports = [read_report(path) for path in (first, second)]
    comparison = compare(*reports)
    for line in comparison_lines(comparison):
        echo(line)
    if out is not None:
        with replacing(out) as draft:
            Path(draft).write_text(json.dumps(asdict(comparison), indent=1), encoding="utf-8")


def _served(models: list[str], url: str | None, endpoint: str | None, protocol: str) -> tuple[list[str], str | None]:
    """Return the models and the URL of their SGLang server; --model may be just that URL."""
    from retool_mcore.evaluate.cases import model_of_server
    from retool_mcore.rollout.protocol import protocol_class

    if protocol:
        protocol_class(protocol)  # raises for an unknown name, before any request to a server
    if url is not None and endpoint is not None:
        raise ConfigError("--url names an SGLang server and --endpoint an API. Give only one of them.")
    if endpoint is None and url is None and len(models) == 1 and models[0].startswith(("http://", "https://")):
        return [model_of_server(models[0])], models[0]
    return models, url


def _cases(models: list[str], tool: str) -> list[Case]:
    from retool_mcore.evaluate.cases import Case

    cases: list[Case] = []
    for text in models:
        name, sign, path = text.partition("=")
        name, path = (name, path) if sign else (_name_of(text), text)
        if tool in ("on", "both"):
            cases.append(Case(name=name, model=path))
        if tool in ("off", "both"):
            cases.append(Case(name=f"{name}_text" if tool == "both" else name, model=path, tool=False))
    names = [case.name for case in cases]
    if double := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"several models are called {', '.join(sorted(double))}. Name them: --model NAME=DIRECTORY")
    return cases


def _name_of(model: str) -> str:
    """Return the default name of a model: its folder, or the run's folder for a run's export."""
    parts = [part for part in Path(model).parts if part not in ("/", ".", "..")]
    if len(parts) > 1 and parts[-1] == "export":
        parts.pop()
    return parts[-1] if parts else "model"


class _Bars:
    """Progress of an evaluation: one bar per case (model and tool on/off), with the current stage.

    A bar shows the share of right answers so far. Without a terminal, prints a line for each stage
    that takes long, for the end of each case, and every LINE_EVERY_S seconds.
    """

    def __init__(self, cases: list[Case]) -> None:
        from retool_mcore.run.status import StageColumn, bar_of_steps

        self._progress = bar_of_steps(None, StageColumn(table_column=Column(no_wrap=True)))
        self._tasks = {case.name: self._progress.add_task(case.name, total=None, stage="") for case in cases}
        self._right, self._sampled = Counter[str](), Counter[str]()
        self._current = cases[0].name  # the case that is sampled now or next
        self._slow_stage = ExitStack()  # without a terminal: prints the stage if it takes long
        self._begun_s = self._printed_s = time.monotonic()
        self._notes = ExitStack()  # prints warnings, such as the sandbox's, above the bars

    def __enter__(self) -> _Bars:
        self._notes.enter_context(notes_on(self._progress.console, logging.getLogger("retool_mcore")))
        self._progress.start()
        self.stage(READING)
        return self

    def __exit__(self, *exit_arguments: object) -> None:
        self._slow_stage.close()
        if not self._progress.disable:
            self._progress.live.transient = not self._sampled  # no bars remain after an early error
            self._progress.stop()
        self._notes.close()

    def stage(self, text: str) -> None:
        """Show the start of a stage that may take a while."""
        from retool_mcore.run.status import call_if_slow, line_of_stage

        self._slow_stage.close()
        now_s = time.monotonic()
        self._progress.update(self._tasks[self._current], stage=text, since_s=now_s)
        if self._progress.disable:
            line = line_of_stage(now_s - self._begun_s, text)
            self._slow_stage.enter_context(call_if_slow(lambda: typer.echo(line, err=True), now_s))

    def note(self, text: str) -> None:
        """Print a sentence for the user above the bars."""
        from retool_mcore.run.status import print_text

        if self._progress.disable:
            typer.echo(text, err=True)
        else:
            print_text(self._progress.console, text)

    def start(self, name: str, finished: int, total: int) -> None:
        self._current = name
        self._progress.update(self._tasks[name], total=total, completed=finished)

    def advance(self, name: str, correct: bool) -> None:
        self._slow_stage.close()
        self._right[name] += correct
        self._sampled[name] += 1
        share = f"{self._right[name] / self._sampled[name]:.3f} right"
        self._progress.update(self._tasks[name], advance=1, stage=share, since_s=None)
        left = int(self._progress.tasks[self._tasks[name]].remaining or 0)
        now_s = time.monotonic()
        if self._progress.disable and (not left or now_s - self._printed_s >= LINE_EVERY_S):
            self._printed_s = now_s
            typer.echo(f"{name}: {self._sampled[name]} sampled, {left} left, {share}", err=True)
