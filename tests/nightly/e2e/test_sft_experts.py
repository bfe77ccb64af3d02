"""SFT of a model with experts as a user runs it, killed and continued."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.coin_model import WHOLE_UNDER_TP, give_experts
from tests.e2e.commands import (
    EAST,
    WEST,
    argv_retool,
    argv_sft,
    assert_nothing_left,
    assert_only_loopback_listens,
    dated,
    day_of,
    exact_metrics,
    kill,
    last_step,
    sft_settings,
    started,
    succeed,
    wait_until,
)


def test_experts_that_tp_does_not_cut_continue_bit_exactly(
    task: Path, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
):
    """Two ranks hold two whole experts each; Megatron's own etp = tp would need four.

    `kill -9` of the launcher leaves no rank. The same command resumes the run on another day.
    """
    monkeypatch.setenv("TZ", WEST)
    shutil.copytree(task / "model", tmp_path / "model")
    give_experts(tmp_path / "model")
    words = sft_settings(task, tmp_path, *WHOLE_UNDER_TP, f"model.path={tmp_path}/model", dated(tmp_path))
    succeed(argv_sft(*words, "run.name=whole"), mark)
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *words, "run.name=killed")
    killed = tmp_path / "killed"
    with started(argv, mark, on_terminal=True) as launcher:
        wait_until(lambda: last_step(killed) >= 1, "step 1", 300)
        assert_only_loopback_listens(mark, at_least=3)  # torchrun's store, and both ranks' gloo
        wait_until(lambda: last_step(killed) >= 5, "step 5, after the checkpoint of step 4", 300)
        kill(launcher.pid)
        assert_nothing_left(mark)
    assert last_step(killed) < 8
    monkeypatch.setenv("TZ", EAST)
    succeed(argv, mark)
    assert day_of(killed) == day_of(tmp_path / "whole") == day_of(killed / "export")
    assert exact_metrics(killed) == exact_metrics(tmp_path / "whole")
    exports = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert exports[0] == exports[1]
