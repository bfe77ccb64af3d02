"""The phases of a recorded step of the real bench have names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.perf.test_gaps import (
    PERF,
    gaps,  # noqa: F401  a fixture
)

# perf/kernels.py on one process of platform cpu, which has no device.
RECORD = """
import sys
sys.path.insert(0, {perf!r})
import kernels
from retool_mcore.data.tasks import make_task
make_task("task")
kernels.typer.run(kernels.main)
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
def test_the_phases_of_a_recorded_step_have_names(gaps: Any, tmp_path: Path):
    words = ["sft_tiny_cpu", "cluster.gpus_per_node=1", "train.micro_batch_tokens=2048", "--steps", "3"]
    words += ["--model", "task/model", "--data", "task/sft_train.parquet", "--trace", "step.json.gz"]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RECORD.format(perf=str(PERF)), *words],
        cwd=tmp_path, env=os.environ | alone | {"PYTHONPATH": str(PERF.parent)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert record["seconds"] == {} and record["gaps"] == []
    ranges = gaps.phases(
        event for event in gaps.read_trace(tmp_path / "step.json.gz") if event.get("cat") == "user_annotation"
    )
    names = [name for *_, (name, _) in ranges if not name.startswith(("before", "after"))]
    micro_batch = ["forward of a micro-batch", "loss of a micro-batch", "backward of a micro-batch"]
    micro_batches = (len(names) - 3) // 3
    assert micro_batches > 1
    assert names == ["packing", "cutting into micro-batches", *micro_batch * micro_batches, "optimizer"]
