"""The `retool` command and the two launchers: parse, call, and turn a user's mistake into one line."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.errors import ReToolError
from retool_mcore.process import end_with_parent_if_asked, heed_sigquit

Config = Annotated[Path, typer.Argument(help="one TOML file of configs/")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="resolve through verl, print what differs from its defaults, start nothing")
]
PlatformName = Annotated[
    str | None, typer.Option("--platform", help="cpu, cuda or ascend, instead of run.platform", show_default=False)
]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
F = TypeVar("F", bound=Callable[..., Any])
OTHER_RANKS_WAIT_S = 30.0


def guarded(function: F) -> F:
    """Print a ReToolError as one line and exit with 2; Ctrl-C exits with 130. Anything else is our bug and raises."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ReToolError as error:
            rank = os.environ.get("RANK", "0")
            if rank != "0":
                # Most errors meet all ranks of a torchrun alike: rank 0 tells it, and torchrun ends the others here.
                time.sleep(OTHER_RANKS_WAIT_S)
            typer.echo(f"error: {f'rank {rank}: ' if rank != '0' else ''}{error}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place = f" for {error.filename}" if error.filename else ""
            typer.echo(
                f"error: no space is left{place}. What was complete before is kept; free some, then run the same "
                "command again.",
                err=True,
            )
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    return wrapper  # type: ignore[return-value]


@guarded
def _sft_rank(
    config: Config, overrides: Overrides = None, platform: PlatformName = None, dry_run: DryRun = False
) -> None:
    run = load_config(SftConfig, config, settings_of(overrides, platform))
    if dry_run:
        _print_dry_run(run)
        return
    from retool_mcore.train import sft

    sft.train(run)


@app.command()
@guarded
def sft(config: Config, overrides: Overrides = None, platform: PlatformName = None, dry_run: DryRun = False) -> None:
    """Supervised fine-tuning on this node: checks the settings, then starts torchrun on launch/sft_mcore.py."""
    settings = settings_of(overrides, platform)
    run = load_config(SftConfig, config, settings)
    if dry_run:
        _print_dry_run(run)
        return
    from retool_mcore.models import check_cores, check_model

    check_model(run)
    check_cores(run)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(run.cluster.gpus_per_node)]
    argv = [*torchrun, "--standalone", "launch/sft_mcore.py", str(config), *settings]
    os.execv(argv[0], argv)  # torchrun takes our place: signals and the exit code are its own


@app.command()
@guarded
def rl(config: Config, overrides: Overrides = None, platform: PlatformName = None, dry_run: DryRun = False) -> None:
    """Reinforcement learning with verl's PPO trainer under Ray."""
    run = load_config(RlConfig, config, settings_of(overrides, platform))
    if dry_run:
        _print_dry_run(run)
        return
    from retool_mcore.train import rl as trainer

    trainer.train(run)


def settings_of(overrides: list[str] | None, platform: str | None) -> list[str]:
    """The overrides of a command line, --platform among them."""
    return [*(overrides or ()), *([f"run.platform={platform}"] if platform else ())]


def _print_dry_run(run: RunConfig) -> None:
    """The report goes to stdout; whatever the engines print while they are imported goes to stderr."""
    from retool_mcore.train.resolve import dry_run

    with redirect_stdout(sys.stderr):
        report = dry_run(run)
    typer.echo(report)


@app.command()
@guarded
def export(
    run_dir: Annotated[Path, typer.Argument(help="a run's folder, or one checkpoint of it")],
    to: Annotated[Path, typer.Option(help="where the Hugging Face model directory is written")],
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face model that transformers and SGLang load."""
    from retool_mcore.train.export import export as export_run

    typer.echo(f"wrote {export_run(run_dir, to)}")


@app.command()
@guarded
def quickstart(
    seed: Annotated[int, typer.Option(help="of the task, the models and the runs")] = 0,
    root: Annotated[Path, typer.Option(help="where everything is written")] = Path("runs/quickstart"),
) -> None:
    """The main job in miniature: task, SFT, export, RL with the tool and without, evaluation, summary."""
    from retool_mcore.quickstart import run

    run(root, seed)


def run_sft() -> None:
    """Entry point of launch/sft_mcore.py, one rank of a torchrun."""
    _run_alone(_sft_rank)


def run_rl() -> None:
    """Entry point of launch/rl.py."""
    _run_alone(rl)


def _run_alone(command: Callable[..., None]) -> None:
    end_with_parent_if_asked()
    heed_sigquit()
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(command)
    alone()


def main() -> None:
    """Entry point of the `retool` console script."""
    end_with_parent_if_asked()
    heed_sigquit()
    from retool_mcore.data.cli import app as data_app
    from retool_mcore.evaluate.cli import app as evaluate_app
    from retool_mcore.planner.cli import app as planner_app
    from retool_mcore.preflight.cli import app as preflight_app
    from retool_mcore.reward.cli import app as reward_app
    from retool_mcore.rollout.cli import app as rollout_app
    from retool_mcore.sandbox.cli import app as sandbox_app

    app.add_typer(data_app, name="data", help="Make, convert and check data sets.")
    app.add_typer(sandbox_app, name="sandbox", help="Serve the code sandbox over HTTP.")
    app.add_typer(
        evaluate_app,
        name="eval",
        help="Score models: `retool eval CONFIG ...`; compare two: `retool eval compare A B`.",
    )
    for commands in (planner_app, preflight_app, reward_app, rollout_app):
        app.registered_commands.extend(commands.registered_commands)
    app()
