"""launch/rl_h200x8.sh on the CPU platform: one node, its sandbox a service; Ctrl-C leaves nothing,
and it continues.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import MARK, ROOT, assert_nothing_left, last_step, wait_until

pytestmark = [pytest.mark.timeout(1500)]


def test_ctrl_c_leaves_nothing_and_the_same_command_continues(task: Path, tmp_path: Path, mark: str):
    files = (f"data.train_file={task}/rl_train.parquet", f'validation.files=["{task}/rl_val.parquet"]')
    size = ("train.prompts_per_step=4", "train.mini_batch_prompts=4", "rollout.group_size=4")
    steps = ("validation.every=100", "checkpoint.every_steps=1", "run.name=one")
    words = (f"run.root={tmp_path}", f"model.path={task}/model", *files, *size, *steps)
    env = {**os.environ, MARK: mark, "PYTHON": sys.executable, "CONFIG": "configs/rl_tiny_cpu.toml",
           "SANDBOX_DIR": str(tmp_path / "sandbox")}  # fmt: skip
    # What a shell starts in its background ignores SIGINT, and all that it starts: pytest may be
    # there.
    argv = ["env", "--default-signal=INT", "bash", "launch/rl_h200x8.sh", *words]
    run_dir = tmp_path / "one"
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(
            [*argv, "train.steps=100"], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until(lambda: last_step(run_dir) >= 1 or script.poll() is not None, "step 1", 480)
            assert last_step(run_dir) >= 1, (tmp_path / "log").read_text()[-3000:]
            os.killpg(script.pid, signal.SIGINT)  # as a terminal sends it: to the whole foreground group
            assert script.wait(timeout=300) == 130
            assert_nothing_left(mark)
            done = last_step(run_dir)
            assert done < 100
            argv.append(f"train.steps={done + 1}")
            again = subprocess.run(argv, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=600, check=False)
        finally:
            script.kill()
            script.wait()
    assert again.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, done + 2))
    resolved = (run_dir / "config.toml").read_text(encoding="utf-8")
    assert json.dumps(f"unix://{tmp_path}/sandbox/one/sandbox.sock") in resolved
