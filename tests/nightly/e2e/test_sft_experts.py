"""SFT of a model with experts as a user runs it, killed and continued."""

import shutil
from pathlib import Path

from tests.e2e.coin_model import WHOLE_UNDER_TP, give_experts
from tests.e2e.commands import (
    argv_retool,
    argv_sft,
    assert_nothing_left,
    exact_metrics,
    kill,
    last_step,
    sft_settings,
    started,
    succeed,
    wait_until,
)


def test_experts_that_tp_does_not_cut_continue_bit_exactly(task: Path, tmp_path: Path, mark: str):
    """Two ranks hold two whole experts each; Megatron's own etp = tp would need four.

    `kill -9` of the launcher leaves no rank.
    """
    shutil.copytree(task / "model", tmp_path / "model")
    give_experts(tmp_path / "model")
    words = sft_settings(task, tmp_path, *WHOLE_UNDER_TP, f"model.path={tmp_path}/model")
    succeed(argv_sft(*words, "run.name=whole"), mark)
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *words, "run.name=killed")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with started(argv, mark, on_terminal=True) as launcher:
        wait_until(lambda: last_step(killed) >= 5, "step 5, after the checkpoint of step 4", 300)
        kill(launcher.pid)
        assert_nothing_left(mark)
    assert last_step(killed) < 8
    succeed(argv, mark)
    assert exact_metrics(killed) == exact_metrics(whole)
    exports = [(run_dir / "export" / "model.safetensors").read_bytes() for run_dir in (whole, killed)]
    assert exports[0] == exports[1]
