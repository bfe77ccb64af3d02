"""One error for a process of the run that died or failed: which, its last lines, how to go on.

Ray raises its own traceback beside those of the processes in between; that goes to the run's log.
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
    """What the command line prints for ``error``: a worker's own ReToolError, or a RunError.

    ``why``: the rule by which the error ends the run, if one does.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, RayError):
        error = error.cause  # a process that failed because another had
    if isinstance(error, RayTaskError) and isinstance(error.cause, ReToolError):
        return error.cause
    log = config.run.dir / "logs" / "rl.log"
    said = _COLOURS.sub("", str(error))
    found = _FAILED.search(said) if isinstance(error, RayTaskError) else _DIED.search(said)
    if found is None:
        what, lines = f"Ray ended the run: {type(error).__name__}: {said.splitlines()[0]}", []
    elif isinstance(error, RayTaskError):
        first, *more = f"{type(error.cause).__name__}: {error.cause}".splitlines()
        cause = f"{first} {more[0]}" if first.endswith(":") and more else first  # hydra's: the cause is below
        what, lines = f"{_name(found)} failed with {cause}", []
    else:
        what, lines = f"{_name(found)} died", last_lines(log, int(found["pid"]))
    told = "".join(f"\n  {line}" for line in lines)
    told = f"Its last lines:{told}\n" if told else ""
    if what.endswith(" died"):
        told = f"If it ran out of memory, dmesg shows the kill. {told}"
    what = f"{what}, and {why}" if why else what
    return RunError(f"{what}. {told}The log is {log}. {_remedy_for_resume(config)}")


def _name(found: re.Match[str]) -> str:
    """Of an actor's process: "MeasuredServer (process 4711)"."""
    return f"{found['what'].rpartition('<locals>.')[2]} (process {found['pid']})"


def last_lines(log: Path, pid: int) -> list[str]:
    """The last lines that the process wrote to the run's log, at most LAST_LINES."""
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
