"""`retool plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from retool_mcore.cli.common import Config, Overrides, PlatformName, guarded, settings_of
from retool_mcore.config import RlConfig, load_run
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import get_platform

app = typer.Typer()


@app.command()
@guarded
def plan(
    config: Config,
    overrides: Overrides = None,
    *,
    platform: PlatformName = None,
    hardware: Annotated[str | None, typer.Option(help="h100x16, h200x8, a2x8, ... [default: the run's name]")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="mean length of a sequence, with its prompt")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Estimate memory by part and time by phase, without a device.

    Refuses a run that cannot fit, and says by how much.
    """
    from retool_mcore.model.files import of_model
    from retool_mcore.planner.hardware import of_run, parse
    from retool_mcore.planner.plan import make_plan
    from retool_mcore.planner.report import refusal, report
    from retool_mcore.planner.search import proposals

    run = load_run(config, settings_of(overrides, platform))
    chosen = get_platform(run.run.platform)
    chosen.check_dtype(run)
    if platform and chosen.mapping() and not as_json:
        typer.echo(chosen.mapping())
    if isinstance(run, RlConfig) and run.train.mode == "async":
        raise ConfigError(
            f'{run.source}: train.mode = "async" gives the engines rollout.gpus = {run.rollout.gpus} of the GPUs, and '
            "a plan is for engines that share them with training. Plan with train.mode=sync rollout.gpus=0 to see a "
            "step's training and its generation."
        )
    devices = parse(hardware) if hardware else of_run(run)
    if devices.count % run.parallel.model_parallel:
        raise ConfigError(
            f"{run.source}: parallel.tp * pp * cp = {run.parallel.model_parallel} does not divide the {devices.count} "
            f"devices of {devices.name}."
        )
    shape = of_model(run.model.path)
    made = make_plan(run, shape, devices, mean_tokens=mean_tokens)
    others = proposals(run, shape, devices, mean_tokens)
    if as_json:
        tree = made.to_dict() | {"hardware": devices.name, "proposals": [other.to_dict() for other in others]}
        typer.echo(json.dumps(tree, indent=2))
    else:
        typer.echo(report(run, shape, devices, made, others))
    if not made.fits:
        raise ConfigError(f"{run.source}: {refusal(made, devices)}.")
