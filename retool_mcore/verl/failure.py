"""Turns Ray's error for a dead or failed process into one message for the user.

The message names the process, quotes its last lines and says how to resume. Ray's own tracebacks go
to the run's log.
"""

import os
import re
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from retool_mcore.config import RlConfig
from retool_mcore.errors import ReToolError, RunError
from retool_mcore.run import checkpoint

LAST_LINES = 8
TAIL_BYTES = 1 << 20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DIED = re.compile(r"class_name: (?P<what>\S+).*?pid: (?P<pid>\d+)", re.DOTALL)
_FAILED = re.compile(r"ray::(?P<what>[\w.]+)\(\).*?pid=(?P<pid>\d+)", re.DOTALL)


def error_for_user(error: RayError, config: RlConfig, why: str = "") -> ReToolError:
    """The error that the command line prints: a worker's own ReToolError, or else a RunError.

    ``why``: the setting because of which the error ends the run, if there is one.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, RayError):
        error = error.cause  # this process failed because another one did
    if isinstance(error, RayTaskError) and isinstance(error.cause, ReToolError):
        return error.cause
    said = _COLOURS.sub("", str(error))
    found = _FAILED.search(said) if isinstance(error, RayTaskError) else _DIED.search(said)
    name = found["what"].rpartition("<locals>.")[2] if found else ""
    if found is None:
        what = f"Ray ended the run: {type(error).__name__}: {said.splitlines()[0]}"
    elif isinstance(error, RayTaskError):
        first, *more = f"{type(error.cause).__name__}: {error.cause}".splitlines()
        cause = f"{first} {more[0]}" if first.endswith(":") and more else first  # Hydra has it in line 2
        what = f"{name} (process {found['pid']}) failed with {cause}"
    else:
        return death_for_user(name, int(found["pid"]), config, why)
    what = f"{what}, and {why}" if why else what
    return RunError(f"{what}. The log is {_log(config)}. {_remedy_for_resume(config)}")


def death_for_user(what: str, pid: int, config: RlConfig, why: str = "") -> RunError:
    """The error for a process that died, with its last lines; ``pid`` is 0 if unknown."""
    lines = last_lines(_log(config), pid) if pid else []
    process = f"{what} (process {pid})" if pid else what
    reason = f", and {why}" if why else ""
    last = "".join(f"\n  {line}" for line in lines)
    last = f"Its last lines:{last}\n" if last else ""
    return RunError(
        f"{process} died{reason}. If it ran out of memory, dmesg shows the kill. {last}The log is {_log(config)}. "
        f"{_remedy_for_resume(config)}"
    )


def _log(config: RlConfig) -> Path:
    return config.run.dir.absolute() / "logs" / "rl.log"


def last_lines(log: Path, pid: int) -> list[str]:
    """The last LAST_LINES lines that process ``pid`` wrote to the run's log."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        text = _COLOURS.sub("", file.read().decode("utf-8", errors="replace"))
    mark = re.compile(rf"^\([^)\n]*\bpid={pid}\b[^)\n]*\)\s*(.*\S)", re.MULTILINE)
    return [line[:300] for line in mark.findall(text)[-LAST_LINES:]]


def _remedy_for_resume(config: RlConfig) -> str:
    saved = checkpoint.complete_checkpoints(config.run.dir / "checkpoints")
    if not saved:
        return "No checkpoint was complete: the same command starts from the beginning."
    how = (
        "The same command goes on"
        if config.checkpoint.resume == "auto"
        else 'With checkpoint.resume = "auto" it goes on'
    )
    return f"{how} after step {saved[-1].step}, from {saved[-1].path}."
