"""Finds and checks what a page is made of: runs, `retool eval`, files of `retool rollout`.

A first pass reads every record once and keeps a few fields and its place in the file: a page of
many trajectories never holds all their tokens in memory.
"""

import json
import tomllib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from retool_mcore.errors import DataError
from retool_mcore.run.metrics import read_metrics

Kind = Literal["run", "eval", "rollout"]
COLUMNS = ("loss_mask", "logprobs", "actor_logprobs", "versions")  # [T], as response_ids


@dataclass(frozen=True, kw_only=True)
class RecordRow:
    """One recorded trajectory: where it lies, and what it is chosen by.

    ``right`` and ``reward`` are None where the file does not tell.
    """

    path: Path
    offset: int
    step: int
    partition: str
    id: str
    group: str
    right: bool | None
    reward: float | None

    def load(self) -> dict[str, Any]:
        """The whole record."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return json.loads(file.readline())


@dataclass(frozen=True, kw_only=True)
class RecordSource:
    """A folder or file of the command line. ``models``: where its tokenizer may be, best first."""

    name: str
    kind: Kind
    path: Path
    rows: list[RecordRow]
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    models: tuple[str, ...] = ()
    why: str = ""  # there are no rows

    @property
    def events(self) -> list[tuple[int, str]]:
        """(step, what) of checkpoints, resumes and weight syncs, as the run's rows tell them."""
        found: list[tuple[int, str]] = []
        for index, row in enumerate(self.metrics):
            step = int(row["step"])
            if row.get("time_checkpoint_s"):
                found.append((step, "checkpoint"))
            if "time_start_s" in row and (index or step > 1):
                found.append((step, "resume"))
            if row.get("time_weight_sync_s"):
                found.append((step, "weight sync"))
        return found


def open_source(path: Path) -> RecordSource:
    """Read what ``path`` is. Raises DataError when it is damaged or none of the three kinds."""
    if path.is_file():
        return RecordSource(name=path.stem, kind="rollout", path=path, rows=list(_rows(path)))
    if not path.is_dir():
        raise DataError(f"{path} is not there. Give a run's folder, an evaluation's folder or a file of JSON lines.")
    if (path / "samples.jsonl").is_file():
        settings = path / "settings.json"
        model = _object(settings).get("model") if settings.is_file() else None
        rows = list(_rows(path / "samples.jsonl"))
        return RecordSource(
            name=f"{path.name} (evaluation)", kind="eval", path=path, rows=rows, models=(model,) if model else ()
        )
    if (path / "metrics.jsonl").is_file() or (path / "trajectories").is_dir():
        return _run(path)
    inside = sorted(file.parent.name for file in (*path.glob("*/metrics.jsonl"), *path.glob("*/samples.jsonl")))
    hint = f" In it are {', '.join(inside)}: name those." if inside else ""
    raise DataError(
        f"{path} is neither a run (metrics.jsonl or trajectories/) nor an evaluation (samples.jsonl).{hint}"
    )


def _run(path: Path) -> RecordSource:
    files = sorted((path / "trajectories").glob("*.jsonl"), key=_age)
    rows = [row for file in files if file.stat().st_size for row in _rows(file)]
    config = _config(path)
    why = "" if rows else _why(config, bool(files))
    models = tuple(_models(path, config))
    return RecordSource(
        name=path.name, kind="run", path=path, rows=rows, metrics=_metrics(path), models=models, why=why
    )


def _why(config: dict[str, Any], files: bool) -> str:
    """Why a run has no trajectories, as far as its folder tells."""
    rollout: Any = config.get("rollout")
    if config and not isinstance(rollout, dict):
        return "no trajectories: supervised training samples none"
    if config and cast("dict[str, Any]", rollout).get("record_groups") == 0:
        return "no trajectories: the run was told to record none, rollout.record_groups = 0"
    if files:
        return "no trajectories yet: the files in trajectories/ are empty; the first rows come with the first step"
    return "no trajectories: the run has no file in trajectories/"


def _metrics(path: Path) -> list[dict[str, float]]:
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    try:
        rows = cast("list[Any]", read_metrics(file))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not text: {error.reason} at byte {error.start}. Is it a run's file?") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(cast("dict[str, Any]", row).get("step"), int):
            raise DataError(f"{file}, line {number}: a row of metrics is an object with a whole number under step")
    return cast("list[dict[str, float]]", rows)


def _config(path: Path) -> dict[str, Any]:
    config = path / "config.toml"
    try:
        return tomllib.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{config} is damaged: {error}") from error


def _models(path: Path, config: dict[str, Any]) -> Generator[str]:
    model: Any = config.get("model", {}).get("path")
    if isinstance(model, str):
        yield model
    for folder in (path / "export", *sorted(path.glob("checkpoints/*/actor/model/huggingface"))):
        yield str(folder)  # a run that was moved has its tokenizer there


def _age(path: Path) -> int:
    """NAME.2.jsonl is older than NAME.1.jsonl, and that than NAME.jsonl."""
    number = path.name.split(".")[-2]
    return -int(number) if number.isdigit() else 0


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", value)


def _rows(path: Path) -> Generator[RecordRow]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and _cut(line):
                break  # the line that a kill cut short
            yield _row(path, number, offset, line)
            offset += len(line)
    if not offset:
        raise DataError(f"{path} has no complete record")


def _cut(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(b"{")  # not the one line of a picture or a model
    return False


def _row(path: Path, number: int, offset: int, line: bytes) -> RecordRow:
    place = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: the file is damaged, or not of trajectories. {error}") from error
    missing = _missing(row)
    if missing:
        raise DataError(f"{place} is no trajectory: {missing}. rollout/records.py has the keys of one.")
    reward: Any = row.get("reward")
    info: dict[str, Any] = row.get("reward_info") or {}
    right: Any = row.get("correct", info.get("acc", info.get("score")))
    partition = str(row.get("partition", "sample"))
    if "key" in row:
        name, group = str(row["key"]), str(row["key"]).rsplit("_", 2)[0]
    else:
        group = str(row.get("problem", row.get("prompt", number - 1)))
        name = f"{group}-{row.get('sample', 0)}"
    return RecordRow(
        path=path,
        offset=offset,
        step=int(row.get("step") or 0),
        partition=partition,
        id=f"val:{name}" if partition == "val" else name,
        group=group,
        right=None if right is None else float(right) > 0,
        reward=float(reward) if reward is not None else None if right is None else float(right),
    )


def _missing(row: Any) -> str:
    """What a trajectory must have and this value does not; "" if it is whole."""
    if not isinstance(row, dict):
        return "the line holds no object"
    fields = cast("dict[str, Any]", row)
    # An evaluation of a server behind an API has text alone.
    textual = "problem" in fields and not fields.keys() & {"response_ids", *COLUMNS}
    for key in ("turns",) if textual else ("turns", "response_ids"):
        if not isinstance(fields.get(key), list):
            return f"it has no list under {key}"
    length = 0 if textual else len(fields["response_ids"])
    for key in COLUMNS:
        column = fields.get(key)
        if column is not None and (not isinstance(column, list) or len(cast("list[Any]", column)) != length):
            return f"{key} is not a list of {length} values, one for each of response_ids"
    for turn in fields["turns"]:
        if not isinstance(turn, dict) or not isinstance(cast("dict[str, Any]", turn).get("text"), str):
            return "a turn has no text"
    for key in ("step", "reward", "correct"):
        if not isinstance(fields.get(key), int | float | None):
            return f"{key} is not a number"
    return ""
