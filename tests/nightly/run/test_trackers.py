"""Scalars and trajectories in W&B, SwanLab and MLflow: one run, each step once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.run.test_trackers import row, write_two_steps


def test_wandb_keeps_one_run_each_step_once_and_a_table_of_its_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two_steps(tmp_path, "wandb")
    assert not (tmp_path / "tensorboard").exists(), "it was left out of the list"
    known = json.loads((tmp_path / "wandb" / "retool.json").read_text())
    assert known["step"] == 2
    files = wandb_records(tmp_path, known["id"])
    assert len(files) == 2, "one for each start"
    records = [record for file in files for record in file]
    for run in (record.run for record in records if record.HasField("run")):
        assert (run.project, run.display_name) == ("retool", tmp_path.name)
        settings = {item.key: item.value_json for item in run.config.update}
        assert json.loads(settings["train"])["steps"] > 0
    rows = [
        (each.history.step.num, {item.key or "/".join(item.nested_key): item.value_json for item in each.history.item})
        for each in records
        if each.HasField("history")
    ]
    assert [(step, float(items["loss"]), "trajectories/_type" in items) for step, items in rows] == [
        (1, 1.0, True),
        (2, 2.0, False),  # it cannot forget a step
    ]
    table_entry = {name: json.loads(rows[0][1][f"trajectories/{name}"]) for name in ("_type", "nrows", "path")}
    assert (table_entry["_type"], table_entry["nrows"]) == ("table-file", 2)
    (file,) = tmp_path.glob(f"wandb/offline-*/files/{table_entry['path']}")
    assert_table(json.loads(file.read_text()))


def assert_table(table: dict[str, Any]) -> None:
    assert table["columns"] == list(row("a", False))
    assert table["data"] == [list(row("a", False).values()), list(row("b", True).values())]


def wandb_records(folder: Path, run_id: str = "*") -> list[list[Any]]:
    """The records of each file that wandb has written offline, oldest file first."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [[Record.FromString(raw) for raw in _records(path.read_bytes())] for path in files]


def _records(raw: bytes) -> Iterator[bytes]:
    """Whole records of LevelDB's log format: blocks of 32 KiB, parts with headers of 7 bytes."""
    block, header, whole, last = 32768, 7, 1, 4
    at, parts = header, b""  # wandb's own header is as long
    while at + header <= len(raw):
        if (room := block - at % block) < header:
            at += room
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        at += header + length
        if at > len(raw) or kind == 0:
            return
        parts += raw[at - length : at]
        if kind in (whole, last):
            yield parts
            parts = b""


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
    assert "val/mean_8" in run.data.metrics
    [artifact] = client.list_artifacts(run.info.run_id, "trajectories")
    assert artifact.path == "trajectories/step_000001.json"
    file = tmp_path / "mlflow/artifacts" / run.info.run_id / "artifacts" / artifact.path
    assert_table(json.loads(file.read_text()))


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
