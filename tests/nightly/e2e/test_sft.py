"""SFT on GSM8K, and a mistake that only a rank finds."""

import re
import subprocess
import sys
from pathlib import Path

from retool_mcore.data.files import read_rows, write_parquet
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import (
    ROOT,
    argv_retool,
    argv_sft,
    sft_settings,
    succeed,
)


def test_what_only_a_rank_finds_is_the_last_line_too_and_any_folder_will_do(task: Path, tmp_path: Path):
    """torchrun would end with a traceback of its own."""
    config = str(ROOT / "configs" / "sft_tiny_cpu.toml")
    command = argv_retool("sft", config, *sft_settings(task, tmp_path, "data.max_length_tokens=40"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(
        r"error: .*all \d+ rows are longer than data\.max_length_tokens = 40\.?", done.stderr.splitlines()[-1]
    )


def test_real_input_fifty_steps_on_traces_built_from_gsm8k(tmp_path: Path, mark: str, gsm8k: Path):
    """GSM8K's solutions become code traces, executed in the sandbox; a small model learns their
    form.
    """
    built, rejects = tmp_path / "gsm8k.parquet", tmp_path / "rejects.jsonl"
    words = (str(gsm8k), "--out", str(built), "--rejects", str(rejects), "--limit", "600")
    succeed([sys.executable, str(ROOT / "launch" / "gsm8k" / "traces.py"), *words], mark)
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
    succeed(argv, mark, timeout_s=600)
    metrics = read_metrics(tmp_path / "gsm8k" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 51))
    losses = [row["loss"] for row in metrics]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert metrics[49]["val_loss"] < metrics[24]["val_loss"]
