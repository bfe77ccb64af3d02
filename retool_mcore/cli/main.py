"""Command line of `retool` and the two launchers: parses arguments and calls the code."""

import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.cli.common import (
    Commands,
    Config,
    DryRun,
    Overrides,
    PlatformName,
    echo,
    guarded,
    print_os_error,
    settings_of,
)
from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.errors import EXIT_USER_ERROR
from retool_mcore.preflight.limits import require_limits
from retool_mcore.process import (
    bypass_proxy,
    end_with_parent_if_requested,
    reopen_closed_outputs,
    restore_sigquit,
)
from retool_mcore.run.folder import require_unlocked
from retool_mcore.run.start import begin_early, early_stages
from retool_mcore.run.status import show_early_stage

app = typer.Typer()


@guarded
def _sft_rank(
    config: Config, overrides: Overrides = None, platform: PlatformName = None, dry_run: DryRun = False
) -> None:
    run = _load(SftConfig, config, settings_of(overrides, platform), dry_run=dry_run)
    first = os.environ.get("RANK") == "0"  # unset without torchrun, which training then rejects
    with show_early_stage("sft") if first else nullcontext():
        if os.environ.get("LOCAL_RANK") == "0" and not early_stages():  # started by torchrun, not `retool sft`
            _check(run)
            begin_early("processes")
        from retool_mcore.run.export import finish
        from retool_mcore.run.signals import ignore_signals
        from retool_mcore.train import sft

    sft.train(run)
    if first:
        finish(run)
    ignore_signals()  # only shutdown is left; a signal would interrupt imports in Ray's exit handlers


@app.command()
@guarded
def sft(config: Config, overrides: Overrides = None, platform: PlatformName = None, dry_run: DryRun = False) -> None:
    """Supervised fine-tuning on this node.

    Checks the settings, then starts one process for each device by torchrun.
    """
    settings = settings_of(overrides, platform)
    run = _load(SftConfig, config, settings, dry_run=dry_run)
    require_unlocked(run.run.dir)
    begin_early("settings")
    with show_early_stage("sft"):
        _check(run)
    begin_early("processes")
    torchrun = [sys.executable, "-m", "retool_mcore.cli.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    ranks = ["--nproc-per-node", str(run.cluster.gpus_per_node), "--module", "retool_mcore.cli.sft_rank"]
    argv = [*torchrun, *ranks, str(config), *settings]
    os.execv(argv[0], argv)  # torchrun replaces this process, and handles signals and the exit code


@app.command()
@guarded
def rl(config: Config, overrides: Overrides = None, platform: PlatformName = None, dry_run: DryRun = False) -> None:
    """Reinforcement learning with verl's PPO trainer under Ray."""
    run = _load(RlConfig, config, settings_of(overrides, platform), dry_run=dry_run)
    require_unlocked(run.run.dir)
    begin_early("checks")
    with show_early_stage("rl"):
        from retool_mcore.run.export import finish
        from retool_mcore.train import rl as trainer

    trainer.train(run)
    finish(run)


def _load[R: (SftConfig, RlConfig)](kind: type[R], config: Path, settings: list[str], *, dry_run: bool) -> R:
    """Load a run file and check this shell's limits; with --dry-run, print the report and exit."""
    run = load_config(kind, config, settings)
    if dry_run:
        _print_dry_run(run)
        raise typer.Exit
    require_limits(run)
    return run


def _check(run: RunConfig) -> None:
    from retool_mcore.platforms.base import get_platform
    from retool_mcore.preflight.check import CheckScope, check, require

    for note in require(check(run, CheckScope(platform=get_platform(run.run.platform)))):
        echo(note)


def _print_dry_run(run: RunConfig) -> None:
    """Print the report, without the output and warnings of the engines' own code."""
    from retool_mcore.train.dry_run import dry_run

    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = dry_run(run)
    typer.echo(report)


@app.command()
@guarded
def export(
    run_dir: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
    to: Annotated[Path, typer.Option(help="the Hugging Face model directory to write")],
    checkpoint: Annotated[str, typer.Option(help="newest, best (by best.metric), or a step")] = "newest",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="for a run with [lora]: only the adapters, for peft")
    ] = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model for transformers and SGLang."""
    from retool_mcore.run.export import export as export_run

    typer.echo(f"wrote {export_run(run_dir, to, checkpoint, adapter=adapter)}")


@app.command()
@guarded
def quickstart(
    seed: Annotated[int, typer.Option(help="seed of the task, the models and the runs")] = 0,
    root: Annotated[Path, typer.Option(help="folder for all files")] = Path("runs/quickstart"),
) -> None:
    """Run a whole experiment in miniature, on a CPU.

    Stages: task, SFT, RL with the tool, RL without it, evaluation, summary.
    """
    from retool_mcore.quickstart import run

    run(root, seed)


def run_sft() -> None:
    """Entry point of launch/sft_mcore.py: one rank under torchrun."""
    _run_alone(_sft_rank)


def run_rl() -> None:
    """Entry point of launch/rl.py."""
    _run_alone(rl)


def prepare() -> None:
    """Set up the process before a command parses its arguments."""
    reopen_closed_outputs()
    end_with_parent_if_requested()
    restore_sigquit()
    bypass_proxy()
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # terminals without UTF-8 show a replacement character


def _run_alone(command: Callable[..., None]) -> None:
    prepare()
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command()(command)
    alone()


def all_commands() -> typer.Typer:
    """Build `retool` with all command groups; each group is in the file of its name."""
    from retool_mcore.cli.config import app as config_app
    from retool_mcore.cli.data import app as data_app
    from retool_mcore.cli.evaluate import app as evaluate_app
    from retool_mcore.cli.planner import app as planner_app
    from retool_mcore.cli.preflight import app as preflight_app
    from retool_mcore.cli.report import app as report_app
    from retool_mcore.cli.reward import app as reward_app
    from retool_mcore.cli.rollout import app as rollout_app
    from retool_mcore.cli.view import app as view_app
    from retool_mcore.sandbox.server.command import app as sandbox_app

    root = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich truncates long options at 80 columns and parses [validation] as markup
        help="Train and score ReTool models.",
    )

    @root.callback()
    def options(  # pyright: ignore[reportUnusedFunction]  typer calls it
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
        ] = False,
    ) -> None: ...

    groups = (app, planner_app, preflight_app, report_app, reward_app, rollout_app, view_app)
    for commands in groups:
        root.registered_commands.extend(commands.registered_commands)
    root.add_typer(config_app, name="config", help="Explain a run file's keys; make one from verl's file.")
    root.add_typer(data_app, name="data", help="Make, convert and check data sets.")
    root.add_typer(sandbox_app, name="sandbox", cls=Commands, help="Serve the code sandbox over HTTP.")
    root.add_typer(
        evaluate_app,
        name="eval",
        help="Score models: `retool eval CONFIG ...`; compare two: `retool eval compare A B`.",
    )
    return root


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"retool_mcore {installed_version('retool_mcore')}")
        raise typer.Exit()


def main() -> None:
    """Entry point of the `retool` console script."""
    prepare()
    try:
        all_commands()()
    except OSError as error:  # outside commands, for example printing help to a full disk
        print_os_error(error)
        raise SystemExit(EXIT_USER_ERROR) from error
