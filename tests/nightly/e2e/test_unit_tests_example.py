"""The example of code problems with hidden tests, trained on a CPU as its configuration says."""

import json
import sys
from pathlib import Path

import pytest

from configs.examples.unit_tests_data import make
from retool_mcore.platforms import get_platform
from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import argv_sft, succeed

pytestmark = [pytest.mark.timeout(2400)]
CONFIG = "configs/examples/rl_unit_tests_cpu.toml"


def test_rl_unlearns_the_habit_that_fails_the_hidden_tests(tmp_path: Path, mark: str):
    """SFT shows code without its constant in half of the rows; the tests tell which half."""
    get_platform("cpu").activate()
    task = tmp_path / "task"
    make(task)
    files = (f"data.train_file={task}/sft_train.parquet", f'validation.files=["{task}/sft_val.parquet"]')
    succeed(argv_sft(f"run.root={tmp_path}", "run.name=sft", f"model.path={task}/model", *files), mark, 1200)
    settings = (f"run.root={tmp_path}", "run.name=rl", f"model.path={tmp_path}/sft/export", "validation.before=true")
    files = (f"data.train_file={task}/rl_train.parquet", f'validation.files=["{task}/rl_val.parquet"]')
    succeed([sys.executable, "launch/rl.py", CONFIG, *settings, *files], mark, 1200)
    before, *rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert len(rows) == 16 and all(row["rollout/dropped"] == 0 for row in rows)
    assert all(row["behavior/calls/submit"] > 0.5 for row in rows)
    # Two runs: 0.48 to 0.70 of the first steps' 64 samples each, 0.88 and 0.92 of 256 at the end.
    assert rows[-1]["val/accuracy"] > max(before["val/accuracy"] + 0.1, 0.8)
    for line in (tmp_path / "rl" / "trajectories" / "trajectories.jsonl").open():
        told = json.loads(line)
        submissions = [result for turn in told["turns"] for result in turn["results"] if result["tool"] == "submit"]
        last = submissions[-1]["shown"] if submissions else "0 of 3"
        assert told["reward"] == pytest.approx(int(last[0]) / 3 if " of 3 tests passed" in last else 0.0)
