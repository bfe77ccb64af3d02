"""A run saves when it gets a signal, and the same command resumes it, with a whole run's result.

Of SFT: tests/unit/train/test_sft_run.py, and tests/e2e/test_async_save.py.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import MARK, ROOT, argv_rl, assert_nothing_left, last_step, succeed, wait_until

SIZE = ("train.prompts_per_step=8", "train.mini_batch_prompts=4", "rollout.group_size=2", "rollout.protocol=retool")
SIZE += ("data.max_prompt_tokens=300", "rollout.max_response_tokens=400", "rollout.record_groups=8")
STEPS = ("train.steps=5", "checkpoint.every_steps=50", "checkpoint.grace_s=100", "validation.every=0")
AHEAD = ("train.prefetch_batches=1.0", "train.max_staleness={wait=4}")
MODES = {
    "partial_rollout": ("train.mode=partial_rollout",),
    "async": ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_rl_resumes_with_all_prompts_in_flight(mode: str, tmp_path: Path, mark: str):
    """Whether the signal finds step 3 sampling or learning, 8 prompts are in flight at the end."""
    coin = write_coin_task(tmp_path, calls=True, repeat_wrong=50)
    argv = argv_rl(f"run.root={tmp_path}", "run.name=rl", *coin, *SIZE, *STEPS, *AHEAD, *MODES[mode])
    folder = tmp_path / "rl"
    child = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, MARK: mark}, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: last_step(folder) >= 2 or child.poll() is not None, "step 2", 300)
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=200)
    assert child.returncode == 143 and "Traceback" not in stderr, stderr[-3000:]
    (saved,) = [each.step for each in complete_checkpoints(folder / "checkpoints")]
    assert saved == last_step(folder) in (2, 3)
    assert f"note: ended by SIGTERM: step {saved} is saved, and the same command resumes after it" in stderr
    assert_nothing_left(mark)
    succeed(argv, mark, timeout_s=400)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    rows = [json.loads(line) for line in (folder / "trajectories/trajectories.jsonl").open()]
    learnt = {(row["step"], row["key"].split("_")[0]) for row in rows if row["partition"] == "train"}
    assert len(learnt) == len({name for _, name in learnt}) == 5 * 8, "each step has its own prompts"
    yielded = torch.load(folder / "checkpoints/global_step_5/data.pt", weights_only=False)["_num_yielded"]
    assert yielded == 6 * 8, "those of five steps, and one batch ahead"
