"""SFT as a user runs it: real torchrun, real Megatron, killed and continued."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.data.files import read_rows, write_parquet
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import (
    ROOT,
    argv_retool,
    argv_sft,
    assert_nothing_left,
    assert_one_error,
    assert_only_loopback_listens,
    kill,
    last_step,
    marked_processes,
    press_ctrl_c,
    run,
    started,
    wait_until,
)
from tests.e2e.update_probe import probe, read_updates

pytestmark = pytest.mark.slow

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sft_losses.json").read_text())
EXACT = ("loss", "grad_norm", "lr", "tokens", "loss_tokens", "val_loss")


def settings(task: Path, root: Path, *more: str) -> tuple[str, ...]:
    files = [f"data.train_file={task}/sft_train.parquet", f'validation.files=["{task}/sft_val.parquet"]']
    steps = ("train.steps=8", "validation.every=4", "checkpoint.every_steps=4", "train.global_batch=16")
    return (f"run.root={root}", f"model.path={task}/model", *files, *steps, *more)


def exact_metrics(run_dir: Path) -> list[dict[str, float]]:
    return [{k: row[k] for k in ("step", *EXACT) if k in row} for row in read_metrics(run_dir / "metrics.jsonl")]


def test_a_killed_run_continues_bit_exactly_and_exports(
    task: Path, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
):
    more = ("parallel.tp=2", "optim.beta1=0.8", "optim.beta2=0.95")
    with monkeypatch.context() as environment:
        probe(environment, tmp_path / "probe")
        last_alone = ("run.name=whole", "checkpoint.every_steps=0")
        whole = run(argv_sft(*settings(task, tmp_path, *last_alone, *more)), mark)
    assert whole.returncode == 0, whole.stderr[-3000:]
    told = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    seen = read_updates(tmp_path / "probe")
    assert len(seen) == len(told) == 8
    for update, row in zip(seen, told, strict=True):
        assert [len(part["rows"]) for part in update] == [16, 16], "both tensor-parallel ranks see the whole batch"
        assert {(*part["betas"], part["lr"]) for part in update} == {(0.8, 0.95, row["lr"])}
    # Warm-up over round(0.1 * 8) = 1 update, then a cosine from 3e-3 to 3e-4; no update is made
    # with a rate of 0.
    wanted = [3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * done / 7)) for done in range(8)]
    assert [row["lr"] for row in told] == pytest.approx(wanted, rel=1e-6)
    for name in ("loss", "grad_norm"):  # bit-equal on the CPUs that were tried; another may round otherwise
        assert [row[name] for row in told] == pytest.approx(GOLDEN[name], rel=1e-5)
    between_s = told[-1]["unix_s"] - told[0]["unix_s"]
    assert sum(row["time_step_s"] for row in told[1:]) == pytest.approx(between_s, rel=0.02)
    assert all(row["tokens_per_s_per_gpu"] == row["tokens_per_s"] / 2 for row in told)
    argv = argv_sft(*settings(task, tmp_path, "run.name=killed", *more))
    killed = tmp_path / "killed"
    with started(argv, mark):
        wait_until(lambda: last_step(killed) >= 5, "step 5", 120)
        ranks = [pid for pid, command in marked_processes(mark).items() if "sft_mcore.py" in command]
        kill(max(ranks))
        assert_nothing_left(mark)
    assert last_step(killed) < 8
    again = run(argv, mark)
    assert again.returncode == 0, again.stderr[-3000:]
    assert exact_metrics(killed) == exact_metrics(tmp_path / "whole")
    done = run(argv_retool("export", str(tmp_path / "whole"), "--to", str(tmp_path / "hf")), mark)
    assert done.returncode == 0, done.stderr
    assert [folder.name for folder in (tmp_path / "whole" / "checkpoints").iterdir()] == ["global_step_8"]
    folders = (killed / "export", tmp_path / "hf", tmp_path / "whole" / "export")
    exports = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert exports[0] == exports[1] == exports[2]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(killed / "export")
    assert model.config.num_hidden_layers == 3
    assert_nothing_left(mark)


@pytest.mark.parametrize("ending", [lambda launcher: kill(launcher.pid), press_ctrl_c], ids=["kill -9", "Ctrl-C"])
def test_ending_the_launcher_leaves_no_rank(ending: Callable[[Any], None], task: Path, tmp_path: Path, mark: str):
    run_dir = tmp_path / "sft_tiny_cpu"
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *settings(task, tmp_path))
    with started(argv, mark, on_terminal=True) as launcher:
        wait_until(lambda: last_step(run_dir) >= 1, "step 1", 120)
        assert_only_loopback_listens(mark, at_least=3)  # torchrun's store, and both ranks' gloo
        ending(launcher)
        assert_nothing_left(mark)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("cluster.gpus_per_node=1",), "2 processes were started, and [cluster] of configs/sft_tiny_cpu.toml asks"),
        (("model.path=absent/model",), "absent/model"),
        (("data.train_file=absent.parquet",), "absent.parquet"),
        (("run.platform=cuda", "model.dtype=bfloat16"), 'run.platform = "cuda"'),
        (("parallel.tp=2", "train.steps=0"), "train.steps = 0"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    task: Path, tmp_path: Path, mark: str, more: tuple[str, ...], message: str
):
    done = run(argv_sft(*settings(task, tmp_path, *more)), mark)
    assert_one_error(done, message)
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert_nothing_left(mark)


def test_what_only_a_rank_finds_is_the_last_line_too_and_any_folder_will_do(task: Path, tmp_path: Path):
    """torchrun would end with a traceback of its own."""
    config = str(ROOT / "configs" / "sft_tiny_cpu.toml")
    command = argv_retool("sft", config, *settings(task, tmp_path, "data.max_length_tokens=40"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(r"error: .*none of its \d+ rows is at most .* long\.?", done.stderr.splitlines()[-1])


def test_real_input_fifty_steps_on_traces_built_from_gsm8k(tmp_path: Path, mark: str, gsm8k: Path):
    """GSM8K's solutions become code traces, executed in the sandbox; a small model learns their
    form.
    """
    built, rejects = tmp_path / "gsm8k.parquet", tmp_path / "rejects.jsonl"
    words = ("data", "build", "gsm8k", str(gsm8k), "--out", str(built), "--rejects", str(rejects), "--limit", "600")
    done = run(argv_retool(*words), mark)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for _, row in read_rows(built, ("messages", "tools"))]
    given = min(600, sum(1 for _ in gsm8k.open()))
    assert len(rows) >= 0.95 * given
    write_model(tmp_path / "model", build_tokenizer(rows), seed=0)
    val = tmp_path / "val.parquet"
    write_parquet(val, rows[:16])
    write_parquet(built, rows[16:])
    files = (f"data.train_file={built}", f'validation.files=["{val}"]', "data.max_length_tokens=1024")
    size = ("train.steps=50", "train.global_batch=8", "validation.every=25", "checkpoint.every_steps=25")
    argv = argv_sft(f"run.root={tmp_path}", f"model.path={tmp_path / 'model'}", *files, *size, "run.name=gsm8k")
    done = run(argv, mark, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_metrics(tmp_path / "gsm8k" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 51))
    losses = [row["loss"] for row in metrics]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert metrics[49]["val_loss"] < metrics[24]["val_loss"]
