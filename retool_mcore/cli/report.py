"""`retool report`, `retool runs` and `retool watch`: commands that read runs' folders."""

from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.cli.common import guarded, tell, wide_console

app = typer.Typer()


@app.command()
@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, SFT or RL; several stand side by side")],
    out: Annotated[Path, typer.Option(help="report.html, one file, or report.md with its pictures beside it")],
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval",
            help="a folder of `retool eval` that is neither in a run's folder nor beside it; may be repeated",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write what a run did, for somebody who was not there.

    Evaluations before and after with intervals, curves, behaviour, throughput, phases of a step,
    what was dropped, settings that differ from the defaults, versions and hardware. Several runs
    are compared problem by problem where the same problems were evaluated.
    """
    from retool_mcore.report.build import write_report

    for note in write_report(runs, out, evaluation or ()):
        tell(f"note: {note}", err=True)
    typer.echo(f"wrote {out}")


@app.command()
@guarded
def runs(
    root: Annotated[Path, typer.Argument(help="the folder that run.root says")] = Path("runs"),
) -> None:
    """List the runs under a folder: how far each is, its state, its warnings and its next command.

    A run that holds its folder's lock is running; one that made all its steps has ended; any other
    was killed, or stopped by an error.
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
    once: Annotated[
        bool, typer.Option("--once", help="print one frame; so does an output that is no terminal")
    ] = False,
) -> None:
    """Watch a run in the terminal: progress, the last steps' metrics, the start's stage, warnings.

    Reads only the run's files, so it may be started and stopped at any time. It ends with the run.
    """
    from retool_mcore.report.terminal import watch as follow

    follow(run, wide_console(), once=once)
