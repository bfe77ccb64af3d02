"""A run that is asked to end saves, and the same command goes on, with what a whole run has."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import MARK, ROOT, argv_rl, assert_nothing_left, last_step, succeed, wait_until

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sft_losses.json").read_text())


def argv(task: Path, root: Path) -> list[str]:
    """The run of the golden losses, by the agent that the launch scripts start."""
    torchrun = [sys.executable, "-m", "retool_mcore.cli.torchrun", "--standalone", "--nproc-per-node", "2"]
    files = [f"data.train_file={task}/sft_train.parquet", f'validation.files=["{task}/sft_val.parquet"]']
    steps = ["train.steps=8", "validation.every=4", "checkpoint.every_steps=2", "train.global_batch=16"]
    more = ["parallel.tp=2", "optim.betas=[0.8, 0.95]", "checkpoint.grace_s=60"]
    words = [f"run.root={root}", f"model.path={task}/model", *files, *steps, *more]
    return [*torchrun, "launch/sft_mcore.py", "configs/sft_tiny_cpu.toml", *words]


def test_sft_saves_its_step_and_resumes_from_a_whole_checkpoint(task: Path, tmp_path: Path, mark: str):
    """SIGUSR1 in a step after the second; then four bytes of its optimizer change on the disk."""
    folder = tmp_path / "sft_tiny_cpu"
    child = subprocess.Popen(
        argv(task, tmp_path), cwd=ROOT, env={**os.environ, MARK: mark}, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: last_step(folder) >= 2, "step 2", 300)
    child.send_signal(signal.SIGUSR1)
    _, stderr = child.communicate(timeout=300)
    assert child.returncode == 143, stderr[-3000:]
    assert "Traceback" not in stderr and "SignalException" not in stderr
    step = last_step(folder)
    assert f"note: ended by SIGUSR1: step {step} is saved, and the same command resumes after it" in stderr
    saved = [each.step for each in complete_checkpoints(folder / "checkpoints")]
    assert saved[-1] == step < 8 and len(saved) == 2, "the step that went on is finished and saved"
    assert_nothing_left(mark)
    moments = folder / f"checkpoints/global_step_{step}/actor/optimizer/dist_ckpt/__1_0.distcp"
    with moments.open("r+b") as file:
        file.seek(moments.stat().st_size // 2)
        file.write(b"\xa5\x5a\xa5\x5a")
    again = succeed(argv(task, tmp_path), mark)
    assert f"global_step_{step} is damaged: actor/optimizer/dist_ckpt/__1_0.distcp differs from" in again.stderr
    assert f"resuming after step {saved[0]}, from" in again.stderr
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["loss"] for row in rows] == pytest.approx(GOLDEN["loss"], rel=1e-5)
    assert (folder / "export/model.safetensors").is_file()
    assert (folder / f"checkpoints/global_step_{step}.damaged").is_dir()


MODES = {"partial_rollout": (), "async": ("cluster.gpus_per_node=2", "rollout.gpus=1")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_rl_resumes_with_all_prompts_in_flight(mode: str, tmp_path: Path, mark: str):
    """Whether the signal finds step 3 sampling or learning, 8 prompts are in flight at the end."""
    size = ("train.prompts_per_step=8", "train.mini_batch_prompts=4", "rollout.group_size=2", "rollout.protocol=retool")
    size += ("data.max_prompt_tokens=300", "rollout.max_response_tokens=400", "rollout.record_groups=8")
    steps = ("train.steps=5", "checkpoint.every_steps=50", "checkpoint.grace_s=100", "validation.every=0")
    ahead = (f"train.mode={mode}", "train.prefetch_batches=1.0", "train.max_staleness={wait=4}")
    coin = write_coin_task(tmp_path, calls=True, repeat_wrong=50)
    argv = argv_rl(f"run.root={tmp_path}", "run.name=rl", *coin, *size, *steps, *ahead, *MODES[mode])
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
