"""`retool view`: show runs and their trajectories on one HTML page."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.cli.common import check_output, echo, guarded

app = typer.Typer()


@app.command()
@guarded
def view(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs or evaluations, files of `retool rollout`")],
    *,
    step: Annotated[list[int] | None, typer.Option(help="show only trajectories of this step; may be repeated")] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="maximum number of trajectories; if there are more, a stratified sample")
    ] = 10_000,
    tokenizer: Annotated[Path | None, typer.Option(help="a model directory, instead of the run's")] = None,
    out: Annotated[Path, typer.Option(help="the page to write; overwritten")] = Path("view.html"),
    serve: Annotated[
        bool, typer.Option("--serve", help="also serve the page on this machine, updated while the run continues")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="with --serve; 0: derived from the page's path, or a free port")
    ] = 0,
) -> None:
    """Write runs, evaluations and rollouts to one HTML page that needs no server."""
    from retool_mcore.report.view.page import Written, write_page
    from retool_mcore.report.view.sources import open_source

    check_output(out, ".html", runs)

    def write(live: str = "") -> Written:
        sources = [open_source(path) for path in runs]
        for source in sources:
            if source.skipped:
                first = f"the first is {source.skipped[0]}"
                echo(f"note: {source.name}: {len(source.skipped)} damaged records are skipped; {first}", err=True)
        return write_page(sources, out, steps=step or (), limit=limit, tokenizer=tokenizer, live=live)

    if serve:
        from retool_mcore.report.view.serve import LivePage
        from retool_mcore.report.view.serve import serve as serve_page

        try:
            serve_page(LivePage(runs, out, write), port, typer.echo)
        except KeyboardInterrupt:  # the normal way to stop: print nothing
            raise typer.Exit(128 + signal.SIGINT) from None
        return
    made = write()
    for name in made.without_tokenizer:
        echo(f"{name}: no tokenizer found, so tokens are shown as ids. Set --tokenizer DIR", err=True)
    for name in made.without_tokens:
        echo(f"{name}: no tokens, because an API returns only text", err=True)
    sampled = f", a sample of {made.found}" if made.shown < made.found else ""
    content = f"{made.shown} trajectories{sampled}" if made.found else "curves only"
    typer.echo(f"wrote {out}: {content}, {out.stat().st_size / 1e6:.1f} MB")
