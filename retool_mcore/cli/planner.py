"""`retool plan`: estimate a run's memory and time."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.cli.common import Config, Overrides, PlatformName, echo, guarded, settings_of
from retool_mcore.config import load_run
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
    hardware: Annotated[
        str | None,
        typer.Option(help="h100x16, h200x8, a2x8, ... [default: this machine's GPU, or the suffix of the run's name]"),
    ] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="mean tokens of a sequence, prompt included")] = None,
    like: Annotated[Path | None, typer.Option(help="folder of a run with the lengths and calls to assume")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Estimate a run's memory by component and its time by phase, without a device.

    Measures prompts (RL) or rows (SFT) in data.train_file, if the file and the model exist here.
    Exits with an error if the run does not fit into memory.
    """
    from retool_mcore.model.files import shape_of_model
    from retool_mcore.planner.data_lengths import lengths_of_data_file
    from retool_mcore.planner.hardware import hardware_of_run, parse
    from retool_mcore.planner.lengths import assumed, lengths_of_run_dir
    from retool_mcore.planner.plan import make_plan, training_devices
    from retool_mcore.planner.report import refusal, report
    from retool_mcore.planner.search import proposals
    from retool_mcore.preflight.check import CheckScope, check, require

    run = load_run(config, settings_of(overrides, platform))
    chosen = get_platform(run.run.platform)
    with redirect_stdout(sys.stderr):  # libraries print on import
        notes = require(check(run, CheckScope(platform=chosen, is_target=False)))
    for note in notes:
        echo(f"note: {note}", err=True)
    if platform and chosen.mapping() and not as_json:
        echo(chosen.mapping())
    if like is not None and mean_tokens is not None:
        raise ConfigError(
            f"--like {like} and --mean-tokens {mean_tokens:g} both set the lengths. Give only one of them."
        )
    devices = parse(hardware) if hardware else hardware_of_run(run)
    training = training_devices(run, devices).count
    if training < 1 or training % run.parallel.model_parallel:
        raise ConfigError(
            f"{run.source}: parallel.tp * pp * cp = {run.parallel.model_parallel} does not divide the {training} "
            f"devices of {devices.name} that train."
        )
    shape = shape_of_model(run.model.path)
    lengths = (
        lengths_of_run_dir(like, run) if like is not None else assumed(run, mean_tokens, lengths_of_data_file(run))
    )
    made = make_plan(run, shape, devices, lengths=lengths)
    others = proposals(run, shape, devices, lengths)
    if as_json:
        tree = made.to_dict() | {"hardware": devices.name, "proposals": [other.to_dict() for other in others]}
        typer.echo(json.dumps(tree, indent=2))
    else:
        echo(report(run, shape, devices, made, others))
    if not made.fits:
        raise ConfigError(f"{run.source}: {refusal(made, devices)}.")
