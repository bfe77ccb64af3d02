"""A step's trajectories in each tracker, read back from the library's own files."""

import json
import time
from pathlib import Path

import pytest

from retool_mcore.run.metrics import MetricWriter
from retool_mcore.run.trackers import Trace
from tests.run.test_trackers import run_in, wandb_records

HOSTILE = "# <script>alert(1)</script>\n![x](http://example.org)"


def row(name: str, right: bool) -> Trace:
    return {
        "trajectory": name,
        "prompt": f"What is 6 times 7?\n{HOSTILE}",
        "response": "42",
        "extracted": None if not right else "42",
        "right": right,
        "reward": 1.0 if right else -1.0,
        "calls": 2,
    }


def write_two_steps(folder: Path, tracker: str) -> None:
    """Step 1 with two trajectories, step 2 with none; after a resume step 2 again, with one."""
    config = run_in(folder, tracker)
    writer = MetricWriter(config, resumed_step=0)
    writer.write(1, {"loss": 1.0}, [row("a", False), row("b", True)])
    writer.write(2, {"loss": 2.0})
    writer.close()
    time.sleep(1.1)  # wandb and SwanLab name a start's folder by the second
    writer = MetricWriter(config, resumed_step=1)
    writer.write(2, {"loss": 3.0}, [row("again", True)])
    writer.close()


def test_wandb_has_a_table_in_the_row_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two_steps(tmp_path, "wandb")
    records = [record for file in wandb_records(tmp_path) for record in file]
    rows = [
        (each.history.step.num, {item.key or "/".join(item.nested_key): item.value_json for item in each.history.item})
        for each in records
        if each.HasField("history")
    ]
    assert [(step, float(items["loss"]), "trajectories/_type" in items) for step, items in rows] == [
        (1, 1.0, True),
        (2, 2.0, False),
    ]
    said = {name: json.loads(rows[0][1][f"trajectories/{name}"]) for name in ("_type", "nrows", "path")}
    assert (said["_type"], said["nrows"]) == ("table-file", 2)
    (file,) = tmp_path.glob(f"wandb/offline-*/files/{said['path']}")
    table = json.loads(file.read_text())
    assert table["columns"] == list(row("a", False))
    assert table["data"] == [list(row("a", False).values()), list(row("b", True).values())]


def test_mlflow_has_a_table_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_two_steps(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("retool").experiment_id])
    assert [each.path for each in client.list_artifacts(run.info.run_id, "trajectories")] == [
        "trajectories/step_000001.json"
    ]
    table = json.loads(
        (tmp_path / "mlflow/artifacts" / run.info.run_id / "artifacts/trajectories/step_000001.json").read_text()
    )
    assert table["columns"] == list(row("a", False))
    assert table["data"] == [list(row("a", False).values()), list(row("b", True).values())]


def test_swanlab_has_a_text_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    write_two_steps(tmp_path, "swanlab")
    said = [path.read_text() for path in tmp_path.glob("swanlab/run-*/media/**/*") if path.is_file()]
    assert sum("6 times 7" in text for text in said) == 2


def test_tensorboard_has_a_text_for_each_that_is_no_markup(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_two_steps(tmp_path, "tensorboard")
    board = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = [f"trajectories/{number}/text_summary" for number in (1, 2)]
    assert set(board.Tags()["tensors"]) == set(tags)
    events = [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors(tags[0])]
    assert [step for step, _ in events] == [1, 2]
    assert "    trajectory: a, extracted: None, right: False" in events[0][1]
    assert "\n    # <script>alert(1)</script>\n    ![x](http" in events[0][1], "four spaces: code, no markup"
