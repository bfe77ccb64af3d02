"""RL with adapters on the real engines: SGLang samples with the base that has the adapters in it.

In `make test` their parts are shown without engines: tests/parity/test_lora.py.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.platforms import get_platform
from retool_mcore.run.export import export
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import argv_rl, succeed
from tests.e2e.test_async_trainer import of_its_version

pytestmark = [pytest.mark.timeout(900)]

SIZE = ("train.prompts_per_step=8", "train.mini_batch_prompts=8", "rollout.group_size=2", "data.max_prompt_tokens=300")
SIZE += ("rollout.max_response_tokens=400", "rollout.protocol=retool", "validation.every=0", "train.steps=3")
SIZE += ("rollout.record_groups=8",)
ADAPTERS = ("lora.rank=8", "lora.alpha=16", "optim.lr=0.01", "algorithm.kl_coef=0.01")
KEPT = ("checkpoint.every_steps=1", "checkpoint.keep=3")
OWN_ENGINES = ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1", "train.max_staleness={wait=1}")
OWN_ENGINES += ("train.prefetch_batches=1.0", "algorithm.importance_sampling=sequence")


@pytest.mark.parametrize("mode", [("train.mode=sync",), OWN_ENGINES], ids=["sync", "async"])
def test_engines_sample_with_the_adapters_of_the_last_step(tmp_path: Path, mark: str, mode: tuple[str, ...]):
    """In mode "async" only the first weight sync has what does not change."""
    get_platform("cpu").activate()  # transformers finds our stand-in for torchvision
    from transformers import AutoModelForCausalLM

    task = write_coin_task(tmp_path, calls=True, repeat_wrong=50)
    words = argv_rl(f"run.root={tmp_path}", "run.name=rl", *task, *SIZE, *ADAPTERS, *KEPT, *mode)
    succeed(words, mark, timeout_s=600)
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6), "the reference is the base"
    assert rows[-1]["actor/kl_loss"] > 1e-5
    assert all(row["mismatch/max"] <= 1e-4 for row in rows if row["step"] == 1)
    written = (tmp_path / "rl/trajectories/trajectories.jsonl").read_text().splitlines()
    trajectories: list[dict[str, Any]] = sorted(map(json.loads, written), key=lambda row: row["step"])
    by_step = {step: list(found) for step, found in groupby(trajectories, key=lambda row: row["step"])}
    compared = 0
    for version in (1, 2):
        folder = export(tmp_path / "rl", tmp_path / f"of_{version}", str(version))
        model = AutoModelForCausalLM.from_pretrained(folder).float()
        for row in (row for step in by_step.values() for row in step):
            for engine, plain in of_its_version(row, version, model):
                assert engine == pytest.approx(plain, abs=1e-4)
                compared += 1
    assert compared > 20
