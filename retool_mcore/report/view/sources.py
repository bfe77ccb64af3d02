"""Reads and validates the sources of a page: runs, `retool eval` folders, `retool rollout` files.

The first pass reads every record once and keeps only a few fields and its offset in the file, so
that the tokens of all trajectories are never in memory together.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from retool_mcore.config.shared import CONFIG_FILE
from retool_mcore.errors import DataError
from retool_mcore.report.record import Row, RunRecord, read_run

Kind = Literal["run", "eval", "rollout"]
COLUMNS = ("loss_mask", "logprobs", "actor_logprobs", "versions")  # [T], like response_ids


@dataclass(frozen=True, kw_only=True)
class RecordRow:
    """One recorded trajectory: its place in a file, and the fields used to select it.

    ``offset`` is in bytes. ``right`` and ``reward`` are None if the file does not contain them.
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
        """Read the whole record."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return json.loads(file.readline())


@dataclass(frozen=True, kw_only=True)
class RecordSource:
    """A folder or file from the command line. ``models``: tokenizer candidates, best first."""

    name: str
    kind: Kind
    path: Path
    rows: list[RecordRow]
    metrics: Sequence[Row] = ()
    models: tuple[str, ...] = ()
    why: str = ""  # the reason if there are no rows
    skipped: list[str] = field(default_factory=list[str])  # one message per damaged record

    @property
    def events(self) -> list[tuple[int, str]]:
        """(step, event) for checkpoints, resumes and weight syncs, derived from the metrics."""
        events: list[tuple[int, str]] = []
        for index, row in enumerate(self.metrics):
            step = int(row["step"])
            if row.get("timing_s/save_checkpoint"):
                events.append((step, "checkpoint"))
            if "timing_s/start" in row and (index or step > 1):
                events.append((step, "resume"))
            if row.get("timing_s/update_weights"):
                events.append((step, "weight sync"))
        return events


def open_source(path: Path) -> RecordSource:
    """Read a source of any kind. Raises DataError if it is damaged or of an unknown kind."""
    skipped: list[str] = []
    if path.is_file():
        rows = list(_rows(path, skipped))
        return RecordSource(name=path.stem, kind="rollout", path=path, rows=rows, skipped=skipped)
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Give a run's folder, an evaluation's folder or a file of JSON lines.")
    if (path / "samples.jsonl").is_file():
        model = _evaluated_model(path / "settings.json")
        rows = list(_rows(path / "samples.jsonl", skipped))
        models = (model,) if model else ()
        name = f"{path.name} (evaluation)"
        return RecordSource(name=name, kind="eval", path=path, rows=rows, models=models, skipped=skipped)
    if (path / CONFIG_FILE).is_file():
        return _run(path)
    inside = sorted(file.parent.name for file in (*path.glob(f"*/{CONFIG_FILE}"), *path.glob("*/samples.jsonl")))
    hint = f" It contains {', '.join(inside)}. Name one of these." if inside else ""
    raise DataError(f"{path} is neither a run ({CONFIG_FILE}) nor an evaluation (samples.jsonl).{hint}")


def _evaluated_model(settings: Path) -> str:
    try:
        return str(json.loads(settings.read_text(encoding="utf-8"))["model"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{settings} is damaged: {error}") from error


def _run(path: Path) -> RecordSource:
    run = read_run(path)
    files = sorted((path / "trajectories").glob("*.jsonl"), key=_age)
    skipped: list[str] = []
    rows = [row for file in files if file.stat().st_size for row in _rows(file, skipped)]
    model = run.setting("model.path")
    # If the run was moved to another machine, it still has its export and checkpoints.
    folders = [path / "export", *sorted(path.glob("checkpoints/*/actor/model/huggingface"))]
    models = (*([model] if isinstance(model, str) else []), *map(str, folders))
    why = "" if rows else _why(run, bool(files))
    return RecordSource(
        name=path.name, kind="run", path=path, rows=rows, metrics=run.rows, models=models, why=why, skipped=skipped
    )


def _why(run: RunRecord, files: bool) -> str:
    """Return why a run has no trajectories, as far as its folder shows."""
    if run.kind == "sft":
        return "curves only: supervised fine-tuning samples no trajectories"
    if run.setting("rollout.record_groups") == 0:
        return "no trajectories: rollout.record_groups = 0, so the run recorded none"
    if files:
        return "no trajectories yet: the files in trajectories/ are empty until the first step"
    return "no trajectories: the run has no files in trajectories/"


def _age(path: Path) -> int:
    """Sort key, oldest first: NAME.2.jsonl, NAME.1.jsonl, NAME.jsonl."""
    number = path.name.split(".")[-2]
    return -int(number) if number.isdigit() else 0


def _rows(path: Path, skipped: list[str]) -> Generator[RecordRow]:
    """Yield the valid records of a file; append a message to ``skipped`` for each invalid one.

    Raises DataError if no record is valid.
    """
    offset, valid, before = 0, 0, len(skipped)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _row(path, number, offset, json.loads(line))
                valid += 1
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n") and line.startswith(b"{"):
                    break  # truncated by a kill
                skipped.append(f"{path}, line {number}: {_reason(error)}")
            offset += len(line)
    if not valid:
        why = skipped[before] if len(skipped) > before else str(path)
        raise DataError(
            f"{why}. The file has no complete record of a trajectory. rollout/records.py lists the keys of a record."
        )


def _reason(error: ValueError | RecursionError) -> str:
    if not isinstance(error, ValidationError):
        return "not JSON" if isinstance(error, json.JSONDecodeError) else str(error).splitlines()[0]
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Result(_Checked):
    ok: bool | None = None
    code: str | None = None
    shown: str | None = None
    status: str | None = None
    run_s: float | None = None
    queue_s: float | None = None
    cut_tokens: int | None = None


class _RecordTurn(_Checked):
    text: str
    start: int = 0
    tokens: int = 0
    kind: str | None = None
    error: str | None = None
    repairs: list[str] | None = None
    results: list[_Result] | None = None
    engine_s: float | None = None
    tool_s: float | None = None


class _RewardInfo(_Checked):
    acc: bool | float | None = None
    score: bool | float | None = None


class _RecordBehavior(_Checked):
    malformed: dict[str, int] | None = None
    code_lines: int | None = None


class _Record(_Checked):
    """Fields of a trajectory that the page uses; rollout/records.py documents them."""

    turns: list[_RecordTurn]
    response_ids: list[TokenId] | None = None
    prompt_ids: list[TokenId] | None = None
    loss_mask: list[int] | None = None
    versions: list[int] | None = None
    logprobs: list[float] | None = None
    actor_logprobs: list[float] | None = None
    step: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    key: str | None = None
    partition: str = "sample"
    sample: int = 0
    reward: float | None = None
    correct: bool | float | None = None
    reward_info: _RewardInfo | None = None
    behavior: _RecordBehavior | None = None
    stop_reason: str | None = None
    drop_error: str | None = None
    advantage: float | list[float] | None = None
    started_unix_s: float | None = None
    wall_s: float | None = None

    @model_validator(mode="after")
    def _columns(self) -> Self:
        # Samples of an evaluation through an API have only text.
        if self.response_ids is None and "problem" not in (self.model_extra or {}):
            raise ValueError("response_ids are missing")
        length = len(self.response_ids or ())
        for name in COLUMNS:
            column: list[Any] | None = getattr(self, name)
            if column is not None and len(column) != length:
                raise ValueError(f"{name} is not a list of {length} values, one for each of response_ids")
        return self

    @property
    def right(self) -> bool | None:
        correct = self.correct
        if correct is None:
            info = self.reward_info or _RewardInfo()
            correct = info.score if info.acc is None else info.acc
        return None if correct is None else float(correct) > 0


def _row(path: Path, number: int, offset: int, fields: Any) -> RecordRow:
    """Validate a record. Raises ValueError if it is invalid."""
    record = _Record.model_validate(fields)
    if record.key is not None:
        name, group = record.key, record.key.rsplit("_", 2)[0]
    else:
        group = str(fields.get("problem", fields.get("prompt", number - 1)))
        name = f"{group}-{record.sample}"
    right = record.right
    return RecordRow(
        path=path,
        offset=offset,
        step=record.step or 0,
        partition=record.partition,
        id=f"val:{name}" if record.partition == "val" else name,
        group=group,
        right=right,
        reward=record.reward if record.reward is not None else None if right is None else float(right),
    )
