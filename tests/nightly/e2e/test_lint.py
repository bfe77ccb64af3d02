"""SFT refuses to start on its own validation set."""

import subprocess
import sys

from retool_mcore.data.tasks import TaskSpec, make_task
from tests.unit.data.test_lint import ROOT


def test_sft_does_not_start_on_its_own_validation_set(tmp_path):
    make_task(tmp_path / "task", seed=1, spec=TaskSpec(sft_train=20, sft_val=8, rl_train=4, rl_val=4, eval=4))
    train = tmp_path / "task" / "sft_train.parquet"
    settings = [f"model.path={tmp_path}/task/model", f"data.train_file={train}", f'validation.files=["{train}"]']
    words = ["configs/sft_tiny_cpu.toml", f"run.root={tmp_path}", *settings]
    command = [sys.executable, "-m", "retool_mcore", "sft", *words]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "error: 20 of the 20 problems" in refused.stderr, refused.stderr
    meant = [sys.executable, "-m", "retool_mcore", "preflight", *words, "data.allow_overlap=true"]
    checked = subprocess.run(meant, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "20 of the 20 problems" not in checked.stdout + checked.stderr
