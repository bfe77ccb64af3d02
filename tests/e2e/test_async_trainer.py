"""train.mode = "async" on the real engines: one process trains, and another
one is the SGLang server.
"""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from retool_mcore.platforms import get_platform
from retool_mcore.run.export import find_weights
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import argv_rl, succeed

pytestmark = [pytest.mark.timeout(600)]

STALENESS = "training/off_policy/trajectory_staleness"
SETTINGS = ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1", "train.steps=3")
SETTINGS += ("train.prompts_per_step=8", "rollout.group_size=2", "data.max_prompt_tokens=300")
SETTINGS += ("rollout.max_response_tokens=400", "rollout.protocol=retool")
SETTINGS += ("train.prefetch_batches=1.0", "train.max_staleness={wait=1}", "train.mini_batch_prompts=4")
SETTINGS += ("optim.lr=3e-4", "algorithm.kl_coef=0.01", "algorithm.importance_sampling=sequence")
SETTINGS += ("validation.every=3", "checkpoint.every_steps=1", "checkpoint.keep=3", "rollout.record_groups=8")


def logprobs(row: dict, model: Callable[[torch.Tensor], Any]) -> list[float]:
    """Those of the response's tokens, by the model."""
    tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    with torch.no_grad():
        logprobs_TV = model(tokens).logits[0].log_softmax(-1)
    start = len(row["prompt_ids"]) - 1
    return [float(logprobs_TV[start + at, token]) for at, token in enumerate(row["response_ids"])]


def of_its_version(row: dict, version: int, model: Callable[[torch.Tensor], Any]) -> list[tuple[float, float]]:
    """Of the response's tokens of one version: the engine's log-probability, and the model's."""
    tokens = zip(row["logprobs"], logprobs(row, model), row["loss_mask"], row["versions"], strict=True)
    return [(engine, actor) for engine, actor, own, of_token in tokens if own and of_token == version]


def test_engines_of_their_own_sample_one_step_ahead_with_the_weights_that_were_sent(tmp_path: Path, mark: str):
    """Two updates a step; each token is of the weights whose version it bears, as the checkpoints
    have them.
    """
    coin = write_coin_task(tmp_path, calls=True, repeat_wrong=50)
    succeed(argv_rl(f"run.root={tmp_path}", "run.name=rl", *coin, *SETTINGS), mark, timeout_s=500)
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["mismatch/max"] <= 1e-4, "both updates of a step are compared with the weights at its start"
    for row in rows:
        assert row["rollout/dropped"] == 0
        assert row["perf/throughput"] == row["tokens_per_s"] / 2, "the trainer's device and the engine's"
        assert row[f"{STALENESS}_worst/max"] <= 1, "no token is older than one step"
        assert row["timing_s/update_weights"] > 0
        assert 0.0 < row["rollout_corr/rollout_is_mean"] <= 2.0
    assert max(row[f"{STALENESS}_worst/max"] for row in rows) == 1, "sampling did not run ahead"
    # A response's weight before the cut: one where nothing is stale, and then the product over its
    # tokens.
    assert rows[0]["rollout_corr/rollout_is_max"] == pytest.approx(1.0, abs=1e-2)
    assert min(row["rollout_corr/rollout_is_min"] for row in rows) < 0.9
    assert "val/accuracy" in rows[-1]
    for before, row in pairwise(rows):
        phases_s = [row.get(f"timing_s/{name}", 0.0) for name in ("step", "testing", "metrics", "between_steps")]
        assert sum(phases_s) == pytest.approx(row["unix_s"] - before["unix_s"], rel=0.02)
    get_platform("cpu").activate()  # transformers finds our stand-in for torchvision
    from transformers import AutoModelForCausalLM

    folders = {0: tmp_path / "model"}
    folders |= {step: find_weights(tmp_path / f"rl/checkpoints/global_step_{step}") for step in (1, 2, 3)}
    models = {
        step: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for step, folder in folders.items()
    }
    sampled = [json.loads(line) for line in (tmp_path / "rl/trajectories/trajectories.jsonl").open()]
    learnt = [row for row in sampled if row["partition"] == "train"]
    for step in (1, 2, 3):  # of all groups, so of both updates
        groups = Counter(row["key"].split("_")[0] for row in learnt if row["step"] == step)
        assert len(groups) == 8 and set(groups.values()) == {2}
    for row in learnt:
        if row["step"] == 1:
            assert row["actor_logprobs"] == pytest.approx(logprobs(row, models[0]), abs=1e-4)
            assert isinstance(row["advantage"], float)
    pairs: dict[int, list[tuple[float, float]]] = {step: [] for step in models}
    for row in sampled:
        for version in set(row["versions"]) & models.keys():
            pairs[version] += of_its_version(row, version, models[version])
    assert len([version for version, found in pairs.items() if found]) >= 3, "few versions were ever sampled with"
    for version, found in pairs.items():
        engine, actor = torch.tensor(found or [(0.0, 0.0)]).unbind(-1)
        torch.testing.assert_close(engine, actor, atol=1e-4, rtol=0, msg=lambda text, v=version: f"version {v}: {text}")
    # The check can fail: one version's tokens are not what another version's weights would say.
    others = [pair for row in sampled for pair in of_its_version(row, 0, models[3])]
    assert max(abs(engine - actor) for engine, actor in others) > 1e-3
