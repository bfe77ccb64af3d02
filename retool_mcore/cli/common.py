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
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from retool_mcore.cli import tell_of_end
from retool_mcore.config.base import is_table
from retool_mcore.config.reference import reference
from retool_mcore.errors import EXIT_RETRYABLE, EXIT_USER_ERROR, ConfigError, ReToolError, RolloutError, RunError
from retool_mcore.process import discard_closed_terminal, exit_signal
from retool_mcore.run.ending import Ended
from retool_mcore.run.folder import refused_write
from retool_mcore.run.status import print_text

Config = Annotated[Path, typer.Argument(help="one TOML file of configs/")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="resolve through verl, print what differs from its defaults, start nothing")
]
PlatformName = Annotated[
    str | None, typer.Option("--platform", help="cpu, cuda or ascend, instead of run.platform", show_default=False)
]
ProblemColumns = Annotated[
    list[str] | None,
    typer.Option("--problem", help="Column of the problem; twice for a body and its question.", show_default=False),
]
AnswerColumn = Annotated[str, typer.Option("--answer", help="Column of the ground truth.", show_default=False)]
BoxColumn = Annotated[
    str,
    typer.Option("--solution-box", help="Column of a solution whose last box is the truth.", show_default=False),
]
ChatTemplate = Annotated[str, typer.Option(help="As model.chat_template of a run.", show_default=False)]
TemplateArgs = Annotated[
    str, typer.Option(help="As model.template_args: '{ enable_thinking = false }'.", show_default=False)
]

WIDTH_OF_A_LOG = 120

_FULL = "no space is left{place}. What was complete before is kept; free some, then run the same command again."
_CLOSED = "the rights of a file or folder do not allow it{place}. Name another place, or change its rights."
_NO_FOLDER = "a folder was to be there, and it is a file{place}. Name another place."
_FILES = "too many files are open{place}. Raise the limit (ulimit -n 65536), then run the same command again."
OF_THE_MACHINE = {  # errors of the machine or its user, not bugs: errno -> message
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "a file would be larger than this shell allows{place}. Lift the limit (ulimit -f unlimited), then run "
    "the same command again.",
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: "the file system is read-only{place}. Name another place, or mount it for writing.",
    errno.EISDIR: "a file was to be written, and a folder is there{place}. Name a file.",
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,  # mkdir found a file
    errno.ENAMETOOLONG: "the name is too long{place}. Name a shorter one.",
    errno.ELOOP: "a link leads back to itself{place}. Name another place, or correct the link.",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
}

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
OTHER_RANKS_WAIT_S = 30.0


def guarded(function: F) -> F:
    """Decorate a command: print errors as one line and exit with 2 or 3; exit with 130 on Ctrl-C.

    This covers ReToolError and the OSErrors in OF_THE_MACHINE. Any other exception is a bug of ours
    and propagates.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Ended:  # has printed its message already
            raise
        except BaseException as error:
            code = _told(error)
            if code is None:
                raise
            raise typer.Exit(code) from error

    return wrapper  # type: ignore[return-value]


def _told(error: BaseException) -> int | None:
    """Print ``error`` as one line and return the exit code; None if it is a bug of ours."""
    if number := exit_signal() or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0):
        discard_closed_terminal()
        tell_of_end(number)
        return 128 + number
    if isinstance(error, ReToolError):
        rank = os.environ.get("RANK", "0")
        if os.environ.get("LOCAL_RANK", rank) != "0":
            # Most errors hit all ranks alike. Local rank 0 prints the error; torchrun then kills
            # the other ranks while they wait here.
            time.sleep(OTHER_RANKS_WAIT_S)
        tell(f"error: {f'rank {rank}: ' if rank != '0' else ''}{error}", err=True)
        return EXIT_RETRYABLE if isinstance(error, RunError | RolloutError) else EXIT_USER_ERROR
    if isinstance(error, OSError):
        tell_of_machine(error)
        return EXIT_USER_ERROR
    if isinstance(error, Exception) and (number := refused_write(error)):  # a library's own exception class
        tell_of_machine(OSError(number, ""))
        return EXIT_USER_ERROR
    return None


def tell(text: str, *, err: bool = False) -> None:
    """Print text for the user, wrapped between words on a terminal."""
    print_text(Console(stderr=err), text)


def tell_of_machine(error: OSError) -> None:
    """Print an OSError in OF_THE_MACHINE as one line; raise any other ``error``."""
    if error.errno not in OF_THE_MACHINE:
        raise error
    named = error.filename2 or error.filename  # for a rename, the target
    place = f" ({named})" if named else ""
    tell(f"error: {OF_THE_MACHINE[error.errno].format(place=place)}", err=True)
    try:
        sys.stdout.flush()
    except (OSError, AttributeError):  # stdout is full or closed: let Python's final flush succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def output_named(out: Path, ending: str, sources: Sequence[str | Path] = ()) -> Path:
    """Return ``out``. Raises ConfigError if its suffix is not ``ending`` or it is a source file."""
    if out.suffix != ending:
        raise ConfigError(f"--out {out}: {ending} is written here, by the end of the name. Name {out.name}{ending}.")
    if any(Path(source).exists() and out.exists() and out.samefile(source) for source in sources):
        raise ConfigError(f"--out {out} is what is read, and would be overwritten. Name another file.")
    return out


class Commands(TyperGroup):
    """A command group whose help does not truncate the first sentence of each command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """If a command comes after its arguments, suggest the right order."""
        if args and args[0] not in self.commands and (meant := [word for word in args if word in self.commands][:1]):
            given = " ".join(word for word in args if word != meant[0])
            ctx.fail(f"No such command {args[0]!r}. The command comes first: {ctx.command_path} {meant[0]} {given}")
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
        found = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in found if not each.hidden])


def unless_named(default: str) -> type[Commands]:
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
        raise ConfigError(f"{key} is a key of verl: {reason(key)}.")


def template_args_of(text: str) -> dict[str, Any]:
    """Parse the TOML table in --template-args. Raises ConfigError."""
    value: object = None
    with contextlib.suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"v = {text or '{}'}")["v"]
    if not is_table(value):
        raise ConfigError(f"--template-args {text} is no table of TOML. An example is '{{ enable_thinking = false }}'")
    return value


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, or 120 columns in a log."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_LOG)


def with_bar(run: Callable[[Callable[[], None]], Coroutine[None, None, T]], total: int) -> T:
    """Run ``run(advance)`` with a progress bar and return its result.

    ``run`` must call ``advance()`` once for each of ``total`` rows.
    """
    from rich.progress import Progress

    with Progress(transient=True, disable=not Console().is_interactive) as progress:
        bar = progress.add_task("rows", total=total)
        return asyncio.run(run(lambda: progress.advance(bar)))
