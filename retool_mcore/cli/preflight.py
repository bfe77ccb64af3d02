"""`retool preflight` and `retool get`, which the launch scripts call."""

import sys
from contextlib import redirect_stdout
from functools import partial
from typing import IO, Annotated, cast

import typer
from pydantic import BaseModel
from rich.console import Console

from retool_mcore.cli.common import Config, Overrides, PlatformName, echo, guarded, settings_of
from retool_mcore.config import load_run
from retool_mcore.config.explain import nearest
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import get_platform
from retool_mcore.preflight.findings import Finding
from retool_mcore.run.status import print_text

app = typer.Typer()


@app.command()
@guarded
def preflight(
    config: Config,
    overrides: Overrides = None,
    platform: PlatformName = None,
    *,
    cluster: Annotated[bool, typer.Option("--cluster", help="check only the nodes of the running Ray cluster")] = False,
    wait_s: Annotated[float, typer.Option(help="with --cluster: seconds to wait for the nodes")] = 30.0,
    without_data: Annotated[bool, typer.Option("--without-data", help="skip the data files")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also print checks that pass")] = False,
) -> None:
    """Check everything that a run needs; print a line for each error and warning, and the remedy.

    Exits with 2 if there is an error.
    """
    from retool_mcore.preflight.check import CheckScope, check
    from retool_mcore.preflight.cluster import check_cluster

    run = load_run(config, settings_of(overrides, platform))
    chosen = get_platform(run.run.platform)
    terminal = partial(_print, sys.stdout, verbose)
    with redirect_stdout(sys.stderr):  # engines print on import
        if cluster:
            findings = check_cluster(run, chosen, wait_s, terminal)
        else:
            findings = check(run, CheckScope(platform=chosen, thorough=True, data=not without_data), terminal)
    counts = {
        severity: sum(finding.severity == severity for finding in findings) for severity in ("error", "warning", "ok")
    }
    listed = "" if verbose else "; -v lists them"
    problems = (f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}" for kind in ("error", "warning"))
    echo(f"{', '.join(problems)}, {counts['ok']} checks passed{listed}")
    if counts["error"]:
        raise typer.Exit(2)


def _print(terminal: IO[str], verbose: bool, finding: Finding) -> None:
    if verbose or finding.severity in ("warning", "error"):
        print_text(Console(file=terminal), str(finding))


@app.command()
@guarded
def get(
    config: Config,
    words: Annotated[list[str], typer.Argument(help="settings as section.key=value, and the keys to print")],
    platform: PlatformName = None,
) -> None:
    """Print resolved settings of a run on one line, for scripts.

    Example: retool get CONFIG cluster.nodes run.name
    """
    overrides = [word for word in words if "=" in word]
    run = load_run(config, settings_of(overrides, platform))
    values: list[str] = []
    for key in (word for word in words if "=" not in word):
        section, _, name = key.partition(".")
        table = getattr(run, section) if section in type(run).model_fields else None
        known = list(type(table).model_fields) if isinstance(table, BaseModel) else list(type(run).model_fields)
        if not isinstance(table, BaseModel) or name not in known:
            whole = isinstance(table, BaseModel)
            near = nearest(key if whole else section, [f"{section}.{field}" for field in known] if whole else known)
            raise ConfigError(
                f"{config}: {key!r} is not a setting of this run (write section.key, such as train.steps){near}"
            )
        value = getattr(table, name)
        values.append(" ".join(map(str, cast(list[object], value))) if isinstance(value, list) else str(value))
    typer.echo(" ".join(values))
