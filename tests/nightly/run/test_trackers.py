"""Scalars and trajectories in W&B, SwanLab and MLflow: one run, each step once."""

import json
from pathlib import Path

import pytest

from tests.unit.run.test_trackers import row, write_two_steps

TABLE = [list(row("a", False).values()), list(row("b", True).values())]


def test_wandb_keeps_one_run_each_step_once_and_a_table_of_its_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two_steps(tmp_path, "wandb")
    known = json.loads((tmp_path / "wandb" / "retool.json").read_text())
    assert known["step"] == 2
    files = [path.read_bytes() for path in tmp_path.glob(f"wandb/offline-run-*/run-{known['id']}.wandb")]
    assert len(files) == 2 and any(b"loss" in raw for raw in files), "one for each start"
    (file,) = tmp_path.glob("wandb/offline-*/files/media/table/*.json")
    assert json.loads(file.read_text())["data"] == TABLE


def test_mlflow_keeps_one_run_each_step_once_and_a_table_of_its_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_two_steps(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("retool").experiment_id])
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params["run.platform"] == "cpu"
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(1, 1.0), (2, 2.0)]
    [artifact] = client.list_artifacts(run.info.run_id, "trajectories")
    assert artifact.path == "trajectories/step_000001.json"
    file = tmp_path / "mlflow/artifacts" / run.info.run_id / "artifacts" / artifact.path
    assert json.loads(file.read_text())["data"] == TABLE


def test_swanlab_keeps_its_files_under_one_id_and_a_text_for_each_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    write_two_steps(tmp_path, "swanlab")
    known = json.loads((tmp_path / "swanlab" / "retool.json").read_text())
    files = list(tmp_path.glob("swanlab/run-*/*.swanlab"))
    assert [path.name for path in files] == [f"run-{known['id']}.swanlab"] * len(files) and files
    assert known["step"] == 2 and any(b"loss" in path.read_bytes() for path in files)
    texts = [path.read_text() for path in tmp_path.glob("swanlab/run-*/media/**/*") if path.is_file()]
    assert sum("6 times 7" in text for text in texts) == 2
