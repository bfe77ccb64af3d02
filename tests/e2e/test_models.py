"""A model is named by a folder or a Hub name; a Hub that fails is one error."""

import os
import subprocess
import sys
from pathlib import Path


def sft_by_name(
    name: str, cache: Path, *words: str, hub: tuple[str, str] = ("HF_HUB_OFFLINE", "1")
) -> subprocess.CompletedProcess[str]:
    """`retool sft` of a hub name, without network and with data that is not there."""
    settings = [f"model.path={name}", "data.train_file=absent.parquet", 'validation.files=["absent.parquet"]']
    argv = [sys.executable, "-m", "retool_mcore", "sft", "configs/sft_tiny_cpu.toml", *settings, *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = kept | {"HF_HUB_CACHE": str(cache)} | dict([hub])
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=own)


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path):
    """Node without a network: huggingface_hub would ask six times and print a line for each."""
    done = sft_by_name("Qwen/Qwen3-0.6B", tmp_path, hub=("HF_ENDPOINT", "http://127.0.0.1:9"))
    assert done.returncode == 2 and "Retrying" not in done.stderr, done.stderr
    assert "Connection refused" in done.stderr and "hf download Qwen/Qwen3-0.6B" in " ".join(done.stderr.split())
