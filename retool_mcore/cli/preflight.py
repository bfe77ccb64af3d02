"""`retool preflight` and `retool get`, which the launch scripts call."""

import os
import sys
from contextlib import redirect_stdout
from functools import partial
from typing import IO, Annotated, cast

import typer
from pydantic import BaseModel
from rich.console import Console

from retool_mcore.cli.common import Config, Overrides, PlatformName, guarded, settings_of, tell
from retool_mcore.config import RunConfig, load_run
from retool_mcore.config.explain import nearest
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.preflight.findings import Check, Finding
from retool_mcore.run.status import print_text

app = typer.Typer()


@app.command()
@guarded
def preflight(
    config: Config,
    overrides: Overrides = None,
    platform: PlatformName = None,
    *,
    cluster: Annotated[bool, typer.Option("--cluster", help="only the nodes of the Ray cluster that runs")] = False,
    wait_s: Annotated[float, typer.Option(help="with --cluster: how long to wait for the nodes")] = 30.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also print what is well")] = False,
) -> None:
    """Check all that a run needs and print a line for each error and warning, with what to do.

    Exits with 2 when there is an error.
    """
    from retool_mcore.preflight.findings import run_checks

    run = load_run(config, settings_of(overrides, platform))
    chosen = get_platform(run.run.platform)
    terminal = sys.stdout
    with redirect_stdout(sys.stderr):  # what the engines print when they are imported
        checks = _cluster_checks(run, chosen, wait_s) if cluster else _checks(run, chosen)
        found = run_checks(checks, partial(_tell, terminal, verbose))
    counts = {
        severity: sum(finding.severity == severity for finding in found) for severity in ("error", "warning", "ok")
    }
    listed = "" if verbose else "; -v lists them"
    said = (f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}" for kind in ("error", "warning"))
    tell(f"{', '.join(said)}, {counts['ok']} checks are ok{listed}")
    if counts["error"]:
        raise typer.Exit(2)


def _tell(terminal: IO[str], verbose: bool, finding: Finding) -> None:
    if verbose or finding.severity != "ok":
        print_text(Console(file=terminal), str(finding))


def _checks(run: RunConfig, platform: Platform) -> list[tuple[str, Check]]:
    from retool_mcore.preflight import inputs, machine
    from retool_mcore.preflight.network import open_ports
    from retool_mcore.preflight.sockets import sockets

    checks: list[tuple[str, Check]] = [
        ("settings", partial(machine.settings, run, platform)),
        ("stall", partial(inputs.stall, run)),
        ("versions", partial(machine.versions, platform)),
        ("devices", partial(machine.devices, run, platform)),
        ("disk", partial(machine.disk, run)),
        ("host memory", partial(machine.host_memory, run)),
        ("shared memory", partial(machine.shared_memory, platform)),
        ("open files", partial(machine.limits, platform)),
        ("sockets", partial(sockets, run)),
        ("network", partial(open_ports, run)),
        ("model", partial(inputs.model, run)),
        ("tools", partial(inputs.tools, run)),
        ("tokenizer", partial(inputs.tokenizer, run)),
        ("data", partial(inputs.data, run)),
        ("sandbox", partial(inputs.sandbox, run)),
        ("patch", partial(machine.patches, platform)),
    ]
    if run.cluster.nodes > 1:
        checks.append(("clock", machine.clock))
    if run.cluster.nodes > 1 and os.environ.get("NODE_RANK") == "0":
        numbers = {name: int(os.environ.get(name, port)) for name, port in machine.HEAD_PORTS.items()}
        checks.append(("ports", partial(machine.ports, os.environ.get("HEAD_IP", "0.0.0.0"), numbers)))
    return checks


def _cluster_checks(run: RunConfig, platform: Platform, wait_s: float) -> list[tuple[str, Check]]:
    from retool_mcore.preflight.cluster import check_cluster

    return [("nodes", partial(check_cluster, run, platform, wait_s))]


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
            near = nearest(key if whole else section, [f"{section}.{each}" for each in known] if whole else known)
            raise ConfigError(f"{config}: {key!r} is not a setting of this run, as section.key{near}")
        value = getattr(table, name)
        values.append(" ".join(map(str, cast(list[object], value))) if isinstance(value, list) else str(value))
    typer.echo(" ".join(values))
