"""`retool report`, `retool runs` and `retool watch`: commands that read runs' folders."""

from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.cli.common import echo, guarded, wide_console

app = typer.Typer()


@app.command()
@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="folders of SFT or RL runs; several are compared")],
    out: Annotated[Path, typer.Option(help="report.html, a single file, or report.md with picture files next to it")],
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval",
            help="output folder of `retool eval`, unless it is in or next to a run's folder; may be repeated",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a report of a run.

    It has evaluations with intervals, curves, behaviour, throughput, phases of a step, dropped
    trajectories, settings that differ from the defaults, versions and hardware. Several runs that
    were evaluated on the same problems are compared problem by problem.
    """
    from retool_mcore.report.build import write_report

    for note in write_report(runs, out, evaluation or ()):
        echo(f"note: {note}", err=True)
    typer.echo(f"wrote {out}")


@app.command()
@guarded
def runs(
    root: Annotated[Path, typer.Argument(help="folder of the runs, as in run.root")] = Path("runs"),
) -> None:
    """List the runs under a folder: steps done, state, warnings and the next command of each.

    A run is running while its folder is locked. It has ended after its last step, or when
    best.patience stopped it. A killed run was ended by a signal or an error.
    """
    from retool_mcore.report.terminal import find_runs, runs_table
    from retool_mcore.run.status import printable

    console = wide_console()
    table, warnings, commands = runs_table(root, find_runs(root))
    console.print(table)
    for heading, lines in (("warnings:", warnings), ("next:", commands)):
        if lines:
            typer.echo(heading)
        width = max((len(label) for label, _ in lines), default=0)
        for label, text in lines:
            typer.echo(printable(f"  {label:{width}}  {text}"))


@app.command()
@guarded
def watch(
    run: Annotated[Path, typer.Argument(help="a run's folder, SFT or RL")],
    once: Annotated[bool, typer.Option("--once", help="print one frame, as if the output were not a terminal")] = False,
) -> None:
    """Watch a run in the terminal: start stage, progress, metrics of the last steps, warnings.

    Reads only the run's files, so you can start and stop it at any time. It exits with the run.
    """
    from retool_mcore.report.terminal import watch as follow

    follow(run, wide_console(), once=once)
