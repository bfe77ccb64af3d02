"""Writes a run's metrics to the trackers in ``run.trackers``, in addition to ``metrics.jsonl``.

A library is imported only if ``run.trackers`` names it. Its files are in a folder of its name in
the run's folder. A resumed run continues the tracker's run. TensorBoard purges the steps that are
repeated; the other trackers log each step only once and so keep its first values. A tracker that
fails is reported once and disabled.
"""

import importlib
import importlib.util
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.config import JobConfig
from retool_mcore.errors import ConfigError
from retool_mcore.run.checkpoint import flat
from retool_mcore.run.folder import write_atomic
from retool_mcore.run.status import notes

logger = logging.getLogger(__name__)

PROJECT = "retool"
TRAJECTORIES = "trajectories"  # name of the table, in libraries whose tables have names
LOGIN_WAIT_S = 30.0  # nobody answers a login prompt in a log

Row = Mapping[str, float]
Trace = Mapping[str, str | float | None]  # a trajectory as a table row: column -> value


class TensorBoard:
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], resumed_step: int) -> None:
        board: Any = importlib.import_module("torch.utils.tensorboard")
        self._board = board.SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def log(self, row: Row, step: int, traces: Sequence[Trace] = ()) -> None:
        for number, trace in enumerate(traces, start=1):
            self._board.add_text(f"{TRAJECTORIES}/{number}", _as_markdown(trace), step)
        for name, value in row.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()  # a resumed run would not repeat steps that a kill left unflushed

    def close(self) -> None:
        self._board.close()


class TrackerWithoutPurge:
    """A tracker that cannot purge steps. ``retool.json`` stores its run id and last logged step."""

    name: str
    _run: Any  # wandb and SwanLab only

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], resumed_step: int) -> None:
        self.folder = folder.absolute() / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state_path, known = self.folder / "retool.json", dict[str, Any]()
        if resumed_step and self._state_path.exists():
            known = json.loads(self._state_path.read_text(encoding="utf-8"))
        self._id = self.open(name, config, known.get("id", ""))
        self._save_state(known.get("step", 0))

    def _save_state(self, step: int) -> None:
        self._step = step
        write_atomic(self._state_path, json.dumps({"id": self._id, "step": step}) + "\n")

    def log(self, row: Row, step: int, traces: Sequence[Trace] = ()) -> None:
        if step > self._step:
            self.write(row, step, traces)
            self._save_state(step)

    def open(self, name: str, config: Mapping[str, Any], known: str) -> str:
        """Resume the tracker's run with id ``known``, or start one if it is ""; return the id."""
        raise NotImplementedError

    def write(self, row: Row, step: int, traces: Sequence[Trace]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._run.finish()


class Wandb(TrackerWithoutPurge):
    """With WANDB_MODE=offline, each start writes its own files under one id, for ``wandb sync``."""

    name = "wandb"

    def open(self, name: str, config: Mapping[str, Any], known: str) -> str:
        self._wandb: Any = importlib.import_module("wandb")
        settings = self._wandb.Settings(console="off", silent=True, login_timeout=LOGIN_WAIT_S)
        self._run = self._wandb.init(
            project=PROJECT, name=name, dir=str(self.folder.parent), config=dict(config),
            id=known or uuid.uuid4().hex[:12], resume="allow", settings=settings,
        )  # fmt: skip
        return str(self._run.id)

    def write(self, row: Row, step: int, traces: Sequence[Trace]) -> None:
        rows = [list(trace.values()) for trace in traces]
        table = {TRAJECTORIES: self._wandb.Table(columns=list(traces[0]), data=rows)} if traces else {}
        self._run.log({**row, **table}, step=step, commit=True)


class SwanLab(TrackerWithoutPurge):
    """With SWANLAB_MODE=offline, each start writes its own files under one id.

    ``swanlab sync`` uploads them.
    """

    name = "swanlab"

    def open(self, name: str, config: Mapping[str, Any], known: str) -> str:
        self._swanlab: Any = importlib.import_module("swanlab")
        settings = self._swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        id_ = known or uuid.uuid4().hex[:12]
        self._run = self._swanlab.init(
            project=PROJECT, name=name, log_dir=str(self.folder), config=dict(config),
            id=id_, resume="allow", settings=settings,
        )  # fmt: skip
        return id_

    def write(self, row: Row, step: int, traces: Sequence[Trace]) -> None:
        texts = [self._swanlab.Text(_as_markdown(trace), caption=str(trace["trajectory"])) for trace in traces]
        self._run.log({**row, **({TRAJECTORIES: texts} if texts else {})}, step=step)


class MLflow(TrackerWithoutPurge):
    """Logs to the database ``mlflow/mlflow.db``, or to the server at MLFLOW_TRACKING_URI.

    The logged settings are those of the first start, because MLflow parameters are immutable.
    """

    name = "mlflow"

    def open(self, name: str, config: Mapping[str, Any], known: str) -> str:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(tracking_uri=server or f"sqlite:///{self.folder}/mlflow.db")
        if not known:
            artifacts = None if server else (self.folder / "artifacts").as_uri()
            existing = self._client.get_experiment_by_name(PROJECT)
            experiment = existing.experiment_id if existing else self._client.create_experiment(PROJECT, artifacts)
            known = str(self._client.create_run(experiment, run_name=name).info.run_id)
            settings = [self._entities.Param(_mlflow_name(key), str(value)) for key, value in flat(config).items()]
            self._client.log_batch(known, params=settings)
        self._client.update_run(known, status="RUNNING")
        return known

    def write(self, row: Row, step: int, traces: Sequence[Trace]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._entities.Metric(_mlflow_name(name), float(value), now_ms, step) for name, value in row.items()]
        self._client.log_batch(self._id, metrics=metrics)
        if traces:
            columns = {name: [trace[name] for trace in traces] for name in traces[0]}
            self._client.log_table(self._id, columns, f"{TRAJECTORIES}/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _as_markdown(trace: Trace) -> str:
    """Format a trajectory, with its texts indented as code so that they are not taken as markup."""
    texts = {name: str(trace[name]) for name in ("prompt", "response")}
    short = ", ".join(f"{name}: {value}" for name, value in trace.items() if name not in texts)
    parts = [f"{name}:\n\n" + "\n".join(f"    {line}" for line in text.splitlines()) for name, text in texts.items()]
    return "\n\n".join([f"    {short}", *parts])


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow does not allow in names: "mean@8" becomes "mean_8"."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


LIBRARIES: dict[str, Callable[[Path, str, Mapping[str, Any], int], TensorBoard | TrackerWithoutPurge]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "swanlab": SwanLab,
    "mlflow": MLflow,
}


def check_trackers(config: JobConfig) -> None:
    """Raise ConfigError for a tracker that is not installed or lacks a key. Imports no tracker."""
    for name in config.run.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a plain folder, such as wandb's own ./wandb
            extra = "engine" if name == "tensorboard" else name
            raise ConfigError(
                f'{config.source}: run.trackers names "{name}", which is not installed. Install it with '
                f"pip install 'retool_mcore[{extra}]', or remove it from run.trackers."
            )
    if "wandb" in config.run.trackers and not _has_wandb_key(os.environ):
        raise ConfigError(
            f'{config.source}: run.trackers names "wandb", but no API key was found (WANDB_API_KEY, '
            "~/.netrc). Run `wandb login`; or set WANDB_MODE=offline, which keeps its files in the run's folder for "
            "`wandb sync`."
        )


def _has_wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb has an API key (environment or ``~/.netrc``) or does not need one."""
    from requests.utils import get_netrc_auth  # wandb depends on requests

    names = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DISABLED")
    if environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled") or any(environ.get(name) for name in names):
        return True
    return get_netrc_auth(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai") is not None


class Trackers:
    """All trackers in ``run.trackers``. Their errors never stop the run."""

    def __init__(self, config: JobConfig, folder: Path, *, name: str = "", resumed_step: int) -> None:
        self._open: dict[str, TensorBoard | TrackerWithoutPurge] = {}
        for library in dict.fromkeys(config.run.trackers):
            start = partial(LIBRARIES[library], folder, name or config.run.name, config.model_dump(), resumed_step)
            if (tracker := self._safely(library, start)) is not None:
                self._open[library] = tracker

    def log(self, row: Row, step: int, traces: Sequence[Trace] = ()) -> None:
        """Log a step's metrics and ``traces``, its sampled trajectories."""
        for library, tracker in list(self._open.items()):
            self._safely(library, partial(tracker.log, row, step, traces))

    def close(self) -> None:
        for library, tracker in list(self._open.items()):
            self._safely(library, tracker.close)
        self._open = {}

    def _safely(self, library: str, call: Callable[[], Any]) -> Any:
        """Return ``call()``; after an error, report it and disable the tracker."""
        try:
            return call()
        except Exception as error:  # libraries may raise anything
            self._open.pop(library, None)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            logger.error("tracker %s", library, exc_info=error)
            notes.warning(
                f"the tracker {library} failed and was disabled; the run continues, and metrics.jsonl has all "
                f"metrics. Its error: {reason}"
            )
