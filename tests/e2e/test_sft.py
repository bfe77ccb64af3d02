"""SFT as a user runs it: real torchrun, real Megatron. Killed and continued: test_async_save and
test_sft_experts.
"""

import json
import math
from pathlib import Path

import pytest

from retool_mcore.data.prompt_format import PromptFormat, recorded_format
from retool_mcore.data.tasks import SYSTEM_PROMPT
from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import (
    argv_retool,
    argv_sft,
    assert_nothing_left,
    assert_one_error,
    assert_only_loopback_listens,
    last_step,
    press_ctrl_c,
    run,
    sft_settings,
    started,
    succeed,
    wait_until,
)
from tests.e2e.update_probe import IMPORTED, read_updates

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sft_losses.json").read_text())


def test_a_run_learns_as_it_is_set_and_exports(whole: Path, tmp_path: Path, mark: str):
    rows = read_metrics(whole / "metrics.jsonl")
    seen = read_updates(whole.parent / "probe")
    assert len(seen) == len(rows) == 8
    for update, row in zip(seen, rows, strict=True):
        assert [len(part["rows"]) for part in update] == [16, 16], "both tensor-parallel ranks see the whole batch"
        assert {(*part["betas"], part["lr"]) for part in update} == {(0.8, 0.95, row["lr"])}
    assert all(part["frozen"] > IMPORTED for update in seen for part in update), "collections look at all imports"
    # Warm-up over round(0.1 * 8) = 1 update, then a cosine from 3e-3 to 3e-4; no update is made
    # with a rate of 0.
    wanted = [3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * done / 7)) for done in range(8)]
    assert [row["lr"] for row in rows] == pytest.approx(wanted, rel=1e-6)
    for name in ("loss", "grad_norm"):  # bit-equal on the CPUs that were tried; another may round otherwise
        assert [row[name] for row in rows] == pytest.approx(GOLDEN[name], rel=1e-5)
    between_s = rows[-1]["unix_s"] - rows[0]["unix_s"]
    assert sum(row["timing_s/step"] for row in rows[1:]) == pytest.approx(between_s, rel=0.02)
    assert all(row["perf/throughput"] == row["tokens_per_s"] / 2 for row in rows)
    succeed(argv_retool("export", str(whole), "--to", str(tmp_path / "hf")), mark)
    assert recorded_format(tmp_path / "hf") == PromptFormat(system=SYSTEM_PROMPT, instruction="")
    exports = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "hf", whole / "export")]
    assert exports[0] == exports[1]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole / "export")
    assert model.config.num_hidden_layers == 3


def test_ctrl_c_leaves_no_rank(task: Path, tmp_path: Path, mark: str):
    """As `kill -9` of the launcher does: test_sft_experts."""
    run_dir = tmp_path / "sft_tiny_cpu"
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *sft_settings(task, tmp_path))
    with started(argv, mark, on_terminal=True) as launcher:
        wait_until(lambda: last_step(run_dir) >= 1, "step 1", 300)
        assert_only_loopback_listens(mark, at_least=3)  # torchrun's store, and both ranks' gloo
        press_ctrl_c(launcher)
        assert_nothing_left(mark)


def test_a_mistake_of_two_ranks_is_one_line_and_nothing_is_written(task: Path, tmp_path: Path, mark: str):
    done = run(argv_sft(*sft_settings(task, tmp_path, "cluster.gpus_per_node=1")), mark)
    assert_one_error(done, "2 processes were started, but [cluster] of configs/sft_tiny_cpu.toml needs")
    assert not list(tmp_path.rglob("metrics.jsonl"))
