"""Writes a run's numbers to the libraries of ``run.trackers``, in addition to ``metrics.jsonl``.

Each library is imported only if it is named, and keeps its files in a folder of its name in the
run's folder. ``retool.json`` there holds the id of the library's run and the last step written, so
a resumed run continues it. Only TensorBoard can forget a step. The others get each step once and
show the first numbers of a step that a resumed run repeats. What a kill kept from wandb's files is
written again from ``metrics.jsonl``. With ``rollout.tracked_trajectories`` a step also has
trajectories; a kill may lose the newest.

A library that fails is reported once and not used for the rest of the run.
"""

import configparser
import importlib
import importlib.util
import json
import logging
import netrc
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from retool_mcore.config import JobConfig
from retool_mcore.config.base import leaves
from retool_mcore.errors import ConfigError
from retool_mcore.run.folder import write_whole
from retool_mcore.run.status import notes

logger = logging.getLogger(__name__)

PROJECT = "retool"
TRAJECTORIES = "trajectories"  # the table's name, where a library names one
FAILED = "The tracker %s failed and is switched off; the run goes on."
TOLD = "the tracker {} failed and is switched off; the run goes on, and metrics.jsonl has all numbers. It said: {}"
LOGIN_WAIT_S = 30.0  # a prompt goes to a log, where nobody sees it
BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of LevelDB's log format, in which wandb writes; its own header has 7 bytes, too
WHOLE, LAST = 1, 4  # kinds of a record's parts


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a tracker is opened with: the run's name, folder and settings, and where it goes on.

    ``rows``: those of ``metrics.jsonl`` up to ``resumed_step``.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed_step: int
    rows: Sequence[Mapping[str, float]] = ()


Trace = Mapping[str, str | float | None]  # a trajectory as a table's row, by the names of its columns


class Tracker(Protocol):
    """One library's record of one run. Any method may raise whatever the library raises."""

    def show(self, step: int, traces: Sequence[Trace]) -> None:
        """Trajectories of a step, before its numbers are written."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``tensorboard/``; TensorBoard drops the steps after the resumed one."""

    def __init__(self, start: Start) -> None:
        board: Any = importlib.import_module("torch.utils.tensorboard")
        self._board = board.SummaryWriter(str(start.folder / "tensorboard"), purge_step=start.resumed_step + 1)

    def show(self, step: int, traces: Sequence[Trace]) -> None:
        for number, trace in enumerate(traces, start=1):
            self._board.add_text(f"{TRAJECTORIES}/{number}", _as_markdown(trace), step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()  # a resumed run does not write again what a killed process failed to flush

    def close(self) -> None:
        self._board.close()


class _Memory:
    """``retool.json``: the id of a library's run, and the last step that it was given."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._path = folder / "retool.json"
        found: dict[str, Any] = {}
        if resumed_step and self._path.exists():
            found = json.loads(self._path.read_text(encoding="utf-8"))
        self.id: str = found.get("id", "")
        self.step: int = found.get("step", 0)

    def keep(self, *, id: str | None = None, step: int | None = None) -> None:
        self.id, self.step = id or self.id, self.step if step is None else step
        write_whole(self._path, json.dumps({"id": self.id, "step": self.step}) + "\n")


class _Library:
    """A tracker that cannot forget a step, and so is given each step once."""

    folder_name: str

    def __init__(self, start: Start) -> None:
        self.folder = start.folder.absolute() / self.folder_name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._memory = _Memory(self.folder, start.resumed_step)
        known = self._memory.id
        self._memory.keep(id=self.open(start, known))
        if known and (held := self.held()) is not None:
            for row in start.rows:
                if (step := int(row["step"])) not in held:
                    self.log(step, {name: value for name, value in row.items() if name not in ("step", "unix_s")})
                    held.add(step)
            self._memory.keep(step=max(held, default=0))

    def held(self) -> set[int] | None:
        """The steps that the library's run has; None: all that it was ever given."""
        return None

    def open(self, start: Start, known: str) -> str:
        """Continue the library's run ``known``, or begin one if it is ""; returns its id."""
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        raise NotImplementedError

    def log_table(self, step: int, traces: Sequence[Trace]) -> None:
        """A step's trajectories, whose numbers follow."""
        raise NotImplementedError

    def show(self, step: int, traces: Sequence[Trace]) -> None:
        if step > self._memory.step:
            self.log_table(step, traces)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._memory.step:
            self.log(step, numbers)
            self._memory.keep(step=step)


class Wandb(_Library):
    """Weights & Biases, in ``wandb/``.

    Online the server continues the run and refuses steps that it holds. With WANDB_MODE=offline
    every start writes files of its own under the same id; ``wandb sync`` puts them together.
    """

    folder_name = "wandb"

    def open(self, start: Start, known: str) -> str:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT,
            name=start.name,
            dir=str(self.folder.parent),
            config=dict(start.config),
            id=known or uuid.uuid4().hex[:12],
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, login_timeout=LOGIN_WAIT_S),
        )
        return str(self._run.id)

    def held(self) -> set[int] | None:
        """Offline those on disk; online those before the one at which the server goes on."""
        if self._run.offline:
            return steps_on_disk(self.folder, str(self._run.id))
        return set(range(self._run.starting_step))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step, commit=True)

    def log_table(self, step: int, traces: Sequence[Trace]) -> None:
        table = importlib.import_module("wandb").Table(
            columns=list(traces[0]), data=[list(trace.values()) for trace in traces]
        )
        self._run.log({TRAJECTORIES: table}, step=step, commit=False)  # its numbers commit the step

    def close(self) -> None:
        self._run.finish()


def steps_on_disk(folder: Path, run_id: str) -> set[int]:
    """The steps in the ``*.wandb`` files of all starts of a run below ``folder``."""
    record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    found = (record.FromString(raw) for path in folder.glob(f"*/run-{run_id}.wandb") for raw in _records(path))
    return {each.history.step.num for each in found if each.HasField("history")}


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of a ``*.wandb`` file, up to one that a kill cut short."""
    raw, at, parts = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(raw):
        if (room := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += room
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        at += HEADER_BYTES + length
        if at > len(raw) or kind == 0:
            return
        parts += raw[at - length : at]
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


class SwanLab(_Library):
    """SwanLab, in ``swanlab/``.

    Online it continues the run. With SWANLAB_MODE=offline every start writes files of its own under
    the same id, which ``swanlab sync`` uploads one by one.
    """

    folder_name = "swanlab"

    def open(self, start: Start, known: str) -> str:
        swanlab: Any = importlib.import_module("swanlab")
        id_ = known or uuid.uuid4().hex[:12]
        self._run = swanlab.init(
            project=PROJECT,
            name=start.name,
            log_dir=str(self.folder),
            config=dict(start.config),
            id=id_,
            resume="allow",
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        return id_

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def log_table(self, step: int, traces: Sequence[Trace]) -> None:
        text: Any = importlib.import_module("swanlab").Text
        texts = [text(_as_markdown(trace), caption=str(trace["trajectory"])) for trace in traces]
        self._run.log({TRAJECTORIES: texts}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(_Library):
    """MLflow, in a database ``mlflow/mlflow.db``, or on the server of MLFLOW_TRACKING_URI.

    It would show a repeated step twice. The settings are those of the first start, since its
    parameters cannot change. A write waits for the server.
    """

    folder_name = "mlflow"

    def open(self, start: Start, known: str) -> str:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(tracking_uri=server or f"sqlite:///{self.folder}/mlflow.db")
        self._id = known or self._begin(start, None if server else (self.folder / "artifacts").as_uri())
        self._client.update_run(self._id, status="RUNNING")
        return self._id

    def _begin(self, start: Start, artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT, artifacts)
        begun = str(self._client.create_run(number, run_name=start.name).info.run_id)
        parameters = [
            self._entities.Param(_mlflow_name(key), str(value)) for key, value in leaves(start.config).items()
        ]
        self._client.log_batch(begun, params=parameters)
        return begun

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_mlflow_name(name), float(value), now_ms, step) for name, value in numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def log_table(self, step: int, traces: Sequence[Trace]) -> None:
        columns = {name: [trace[name] for trace in traces] for name in traces[0]}
        self._client.log_table(self._id, columns, f"{TRAJECTORIES}/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _as_markdown(trace: Trace) -> str:
    """Long texts as they are, indented as code, so that a model's text is no markup."""
    short = {name: value for name, value in trace.items() if name not in ("prompt", "response")}
    parts = [
        f"{name}:\n\n" + "\n".join(f"    {line}" for line in str(trace[name]).splitlines())
        for name in ("prompt", "response")
    ]
    return "\n\n".join(["    " + ", ".join(f"{name}: {value}" for name, value in short.items()), *parts])


def _mlflow_name(name: str) -> str:
    """MLflow's names have no "@" and the like: "mean@8" is its "mean_8"."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


LIBRARIES: dict[str, Callable[[Start], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "swanlab": SwanLab,
    "mlflow": MLflow,
}


def check_trackers(config: JobConfig) -> None:
    """Raise ConfigError for a tracker that is not installed or has no key; imports none."""
    for name in config.run.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without origin: a folder of that name, as wandb itself leaves
            extra = "engine" if name == "tensorboard" else name
            raise ConfigError(
                f'{config.source}: run.trackers names "{name}", which is not installed. Install it with '
                f"pip install 'retool_mcore[{extra}]', or leave it out"
            )
    if "wandb" in config.run.trackers and _lacks_wandb_key(os.environ, Path.home()):
        raise ConfigError(
            f'{config.source}: run.trackers names "wandb", and no key for its server is found (WANDB_API_KEY, '
            "~/.netrc). Run `wandb login`; or set WANDB_MODE=offline, which keeps its files in the run's folder for "
            "`wandb sync`."
        )


def _lacks_wandb_key(environ: Mapping[str, str], home: Path) -> bool:
    """Whether wandb would send to a server without a key in WANDB_API_KEY or ``~/.netrc``."""
    settings = configparser.ConfigParser(interpolation=None)  # of `wandb offline` and `wandb login --host`
    with suppress(configparser.Error):
        settings.read([home / ".config" / "wandb" / "settings", Path("wandb", "settings")])
    mode = environ.get("WANDB_MODE", settings.get("default", "mode", fallback=""))
    names = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DISABLED")
    if mode in ("offline", "dryrun", "disabled") or any(environ.get(name) for name in names):
        return False
    url = environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="https://api.wandb.ai")
    for path in (Path(environ.get("NETRC") or home / ".netrc").expanduser(), home / "_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(urlsplit(url).netloc):
                return False
    return True


class Trackers:
    """All trackers that ``run.trackers`` names, opened; none of them can end the run."""

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        *,
        name: str = "",
        resumed_step: int,
        rows: Sequence[Mapping[str, float]] = (),
    ) -> None:
        name = name or config.run.name
        start = Start(name=name, folder=folder, config=config.model_dump(), resumed_step=resumed_step, rows=rows)
        self._open: dict[str, Tracker] = {}
        for library in dict.fromkeys(config.run.trackers):
            try:
                self._open[library] = LIBRARIES[library](start)
            except Exception as error:  # noqa: BLE001  whatever the library raises
                _tell_failed(library, error)

    def write(self, step: int, numbers: Mapping[str, float], traces: Sequence[Trace] = ()) -> None:
        """A step's numbers, and ``traces``: trajectories of it, if there are any."""
        for library, tracker in list(self._open.items()):
            try:
                if traces:
                    tracker.show(step, traces)
                tracker.write(step, numbers)
            except Exception as error:  # noqa: BLE001
                del self._open[library]
                _tell_failed(library, error)

    def close(self) -> None:
        for library, tracker in self._open.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001
                _tell_failed(library, error)
        self._open = {}


def _tell_failed(library: str, error: Exception) -> None:
    """The traceback to the log, and a line to the user."""
    logger.error(FAILED, library, exc_info=error)
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    notes.warning(TOLD.format(library, said))
