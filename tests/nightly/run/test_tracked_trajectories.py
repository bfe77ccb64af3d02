"""Trajectories in W&B, SwanLab and MLflow."""

import json
from pathlib import Path

import pytest

from tests.nightly.run.test_trackers import wandb_records
from tests.unit.run.test_trackers import row, write_two_steps


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
