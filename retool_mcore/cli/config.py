"""`retool config`: explains the keys of a run file, and converts verl's settings to a run file."""

import difflib
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from retool_mcore.cli.common import default_command, echo, guarded
from retool_mcore.config.reference import RUNS, Entry, reference
from retool_mcore.errors import ConfigError

app = typer.Typer(cls=default_command("explain"), no_args_is_help=True)
WIDTH = 100
INDENT = " " * 4


@app.callback()
def config() -> None:
    """Explain a run file's keys, or make one from verl's file.

    `explain` is the default command and may be left out.
    """


@app.command("explain")
@guarded
def explain(
    names: Annotated[
        list[str] | None, typer.Argument(help="sections, or section.key; all by default", show_default=False)
    ] = None,
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="accepted, but without effect: this command always explains")
    ] = True,
    run: Annotated[
        Literal["sft", "rl"] | None, typer.Option(help="only keys of this kind of run", show_default=False)
    ] = None,
) -> None:
    """Explain a run file's keys: all, those of one section, or one."""
    runs = (run,) if run else tuple(RUNS)
    known = reference(runs)
    entries = [entry for name in names or [""] for entry in find(known, name, runs)]
    typer.echo("\n\n".join(map(format_entry, entries)))


@app.command("from-verl")
@guarded
def from_verl(
    file: Annotated[
        Path, typer.Argument(help="verl's run script, its YAML, or a text file with one override per line")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="further overrides of verl, key=value", show_default=False)
    ] = None,
    *,
    out: Annotated[
        Path | None, typer.Option(help="the run file to write; printed by default", show_default=False)
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="run.platform of the run file; by default, from trainer.device")
    ] = None,
) -> None:
    """Convert verl's settings for RL to a run file.

    A comment names the source of each value. Keys without a counterpart are listed at the end, with
    the reason. docs/from_verl.md has the whole mapping.
    """
    from retool_mcore.cli.from_verl import convert
    from retool_mcore.data.files import replacing

    made = convert(file, overrides, platform)
    if out is None:
        typer.echo(made.toml(), nl=False)
    else:
        with replacing(out) as draft:
            Path(draft).write_text(made.toml(), encoding="utf-8")
        typer.echo(f"wrote {out}: {len(made.settings)} settings, {len(made.notes)} keys without a setting")
    for item in made.todo:
        echo(f"to do: {item}", err=True)


def find(entries: Sequence[Entry], name: str, runs: Sequence[str]) -> list[Entry]:
    """Return the entries of a section or a key, or all for "".

    Raises ConfigError, with the closest name, for an unknown name, and for the path of a run file.
    """
    if name.endswith(".toml") or Path(name).is_file():
        raise ConfigError(
            f"{name} is a run file, but this command explains keys. To check the file, run `retool rl {name} "
            "--dry-run`, or `retool sft`."
        )
    name = name.strip("[]").partition("=")[0]
    matching = [entry for entry in entries if name in ("", entry.key, entry.section)]
    if matching:
        return matching
    what = "setting" if "." in name else "section"
    owners = {run.upper() for entry in reference() if name in (entry.key, entry.section) for run in entry.runs}
    if owners:
        raise ConfigError(f"{name} is a {what} of {' and '.join(owners)} only. Leave out --run {runs[0]}.")
    raise ConfigError(f"{name} is not a {what} of a run file{_nearest(entries, name)}")


def _nearest(entries: Iterable[Entry], name: str) -> str:
    """Suggest the closest name: a full key if ``name`` has a dot, else a section or last part."""
    known: dict[str, list[str]] = {}
    for entry in entries:
        called = entry.key if "." in name else entry.key.rpartition(".")[2]
        if entry.key not in known.setdefault(called, []):
            known[called].append(entry.key)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {' or '.join(known[close[0]])}?"
    return f"; the sections are {', '.join(dict.fromkeys(entry.section for entry in entries))}."


def format_entry(entry: Entry) -> str:
    """Format an entry in lines of at most WIDTH characters: name and facts, then explanation."""
    owners = " and ".join(run.upper() for run in entry.runs)
    default = entry.default if entry.default == "required" else f"default {entry.default}"
    name = entry.key if entry.kind else f"[{entry.key}]"
    facts = f"{name}: {entry.kind}; {default}; {owners}" if entry.kind else f"{name}: {owners}"
    head = textwrap.fill(facts, WIDTH, subsequent_indent=INDENT, break_on_hyphens=False)
    body = textwrap.fill(
        entry.explanation, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
    )
    return f"{typer.style(name, bold=True)}{head.removeprefix(name)}\n{body}"
