"""Shared code of the commands: common arguments, and one-line messages for user errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from retool_mcore.cli import print_ended_by
from retool_mcore.config.base import is_table
from retool_mcore.config.reference import reference
from retool_mcore.errors import EXIT_RETRYABLE, EXIT_USER_ERROR, ConfigError, ReToolError, RolloutError, RunError
from retool_mcore.process import discard_closed_terminal, exit_signal
from retool_mcore.run.folder import refused_write
from retool_mcore.run.signals import EndedBySignal
from retool_mcore.run.status import print_text

Config = Annotated[Path, typer.Argument(help="a run file, such as configs/rl_tiny_cpu.toml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="check the settings, print their differences from verl's defaults, and exit"),
]
PlatformName = Annotated[
    str | None, typer.Option("--platform", help="cpu, cuda or ascend, instead of run.platform", show_default=False)
]
ProblemColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--problem",
        help="Column of the problem. Repeat the option if body and question are in separate columns.",
        show_default=False,
    ),
]
AnswerColumn = Annotated[str, typer.Option("--answer", help="Column of the ground truth.", show_default=False)]
BoxColumn = Annotated[
    str,
    typer.Option(
        "--solution-box", help="Column of a solution whose last \\boxed{} is the ground truth.", show_default=False
    ),
]
ChatTemplate = Annotated[str, typer.Option(help="Like model.chat_template of a run.", show_default=False)]
TemplateArgs = Annotated[
    str, typer.Option(help="Like model.template_args of a run: '{ enable_thinking = false }'.", show_default=False)
]

LOG_WIDTH = 120

_FULL = "no space is left{place}. Complete files are kept. Free some space, then run the same command again."
_CLOSED = "permission denied{place}. Choose another path, or change its permissions."
_NO_FOLDER = "expected a folder, found a file{place}. Choose another path."
_FILES = "too many open files{place}. Raise the limit (ulimit -n 65536), then run the same command again."
OS_ERRORS = {  # errors that the machine or its user causes, not bugs: errno -> message
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "this shell limits the size of files{place}. Remove the limit (ulimit -f unlimited), then run the "
    "same command again.",
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: "the file system is read-only{place}. Choose another path, or mount it for writing.",
    errno.EISDIR: "expected a file, found a folder{place}. Choose another path.",
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,  # mkdir found a file
    errno.ENAMETOOLONG: "the name is too long{place}. Choose a shorter one.",
    errno.ELOOP: "a symbolic link points to itself{place}. Choose another path, or correct the link.",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
}

OTHER_RANKS_WAIT_S = 30.0


def guarded[F: Callable[..., Any]](function: F) -> F:
    """Decorate a command: print errors as one line and exit with 2 or 3.

    This covers ReToolError, the OSErrors in OS_ERRORS and failed writes of libraries. Any other
    exception is a bug of ours and propagates. After a signal, the exit code is 128 + the signal's
    number.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except EndedBySignal:  # has printed its message already
            raise
        except BaseException as error:
            code = _report(error)
            if code is None:
                raise
            raise typer.Exit(code) from error

    return wrapper  # type: ignore[return-value]


def _report(error: BaseException) -> int | None:
    """Print ``error`` as one line and return the exit code; None if it is a bug of ours."""
    if number := exit_signal() or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0):
        discard_closed_terminal()
        print_ended_by(number)
        return 128 + number
    if isinstance(error, ReToolError):
        rank = os.environ.get("RANK", "0")
        if os.environ.get("LOCAL_RANK", rank) != "0":
            # Most errors hit all ranks alike. Local rank 0 prints the error; torchrun then kills
            # the other ranks while they wait here.
            time.sleep(OTHER_RANKS_WAIT_S)
        echo(f"error: {f'rank {rank}: ' if rank != '0' else ''}{error}", err=True)
        return EXIT_RETRYABLE if isinstance(error, RunError | RolloutError) else EXIT_USER_ERROR
    if isinstance(error, OSError):
        print_os_error(error)
        return EXIT_USER_ERROR
    if isinstance(error, Exception) and (number := refused_write(error)):  # a library's own exception class
        print_os_error(OSError(number, ""))
        return EXIT_USER_ERROR
    return None


def echo(text: str, *, err: bool = False) -> None:
    """Print text for the user, wrapped between words on a terminal."""
    print_text(Console(stderr=err), text)


def print_os_error(error: OSError) -> None:
    """Print an OSError in OS_ERRORS as one line; raise any other ``error``."""
    if error.errno not in OS_ERRORS:
        raise error
    named = error.filename2 or error.filename  # for a rename, the target
    place = f" ({named})" if named else ""
    echo(f"error: {OS_ERRORS[error.errno].format(place=place)}", err=True)
    try:
        sys.stdout.flush()
    except (OSError, AttributeError):  # stdout is full or closed: let Python's final flush succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check_output(out: Path, ending: str, sources: Sequence[str | Path] = ()) -> None:
    """Raise ConfigError if the suffix of ``out`` is not ``ending``, or if it is a source file."""
    if out.suffix != ending:
        raise ConfigError(f"--out {out}: the name must end in {ending}. Use --out {out.name}{ending}.")
    if any(Path(source).exists() and out.exists() and out.samefile(source) for source in sources):
        raise ConfigError(f"--out {out} is also an input and would be overwritten. Choose another file.")


class Commands(TyperGroup):
    """A command group whose help does not truncate the first sentence of each command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """If a command comes after its arguments, suggest the right order."""
        if args and args[0] not in self.commands and (meant := [word for word in args if word in self.commands][:1]):
            rest = " ".join(word for word in args if word != meant[0])
            ctx.fail(f"No such command {args[0]!r}. The command comes first: {ctx.command_path} {meant[0]} {rest}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """For an unknown option that looks like a setting, explain the syntax of settings."""
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer's vendored click has no public error classes
            name = str(getattr(error, "option_name", ""))
            if "." in name and hasattr(error, "message"):
                vars(error)["message"] = f"No such option: {name}. A setting has no dashes: {name.lstrip('-')}=VALUE"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in commands if not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in shown])


def default_command(default: str) -> type[Commands]:
    """Return a group class that runs the command ``default`` if the arguments name no command."""

    class Group(Commands):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] != "--help" and args[0] not in self.commands:
                args = [default, *args]
            return super().parse_args(ctx, args)

    return Group


def settings_of(overrides: list[str] | None, platform: str | None) -> list[str]:
    """Return the overrides of a command line, including --platform.

    Raises ConfigError for one of verl's keys, and names our setting.
    """
    for override in overrides or ():
        if not override.startswith("verl_overrides."):
            _refuse_key_of_verl(override)
    return [*(overrides or ()), *([f"run.platform={platform}"] if platform else ())]


def _refuse_key_of_verl(override: str) -> None:
    key, _, value = override.lstrip("+").partition("=")
    if "." not in key or key in {entry.key for entry in reference()}:
        return
    from retool_mcore.cli.from_verl import paths_of_settings, reason

    ours = [setting for setting, paths in paths_of_settings().items() if key in paths]
    if ours:
        raise ConfigError(f"{key} is verl's name. Write {ours[0]}={value}")
    if key.startswith(("actor_rollout_ref.", "trainer.")):
        raise ConfigError(f"{key} is a key of verl: {reason(key)[1]}.")


def template_args_of(text: str) -> dict[str, Any]:
    """Parse the TOML table in --template-args. Raises ConfigError."""
    value: object = None
    with contextlib.suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"v = {text or '{}'}")["v"]
    if not is_table(value):
        raise ConfigError(f"--template-args {text} is not a TOML table, such as '{{ enable_thinking = false }}'")
    return value


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, or 120 columns in a log."""
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH)


def with_bar[T](run: Callable[[Callable[[], None]], Coroutine[None, None, T]], total: int) -> T:
    """Run ``run(advance)`` with a progress bar and return its result.

    ``run`` must call ``advance()`` once for each of ``total`` rows.
    """
    from rich.progress import Progress

    with Progress(transient=True, disable=not Console().is_interactive) as progress:
        bar = progress.add_task("rows", total=total)
        return asyncio.run(run(lambda: progress.advance(bar)))
