"""RL of a model with experts whose updates repeat the engine's experts, or those of the first pass.

The whole way: SGLang tells the experts, our loop keeps them over calls and weight updates, and
verl's Megatron actor takes them.
"""

import math
from pathlib import Path

import pytest

from retool_mcore.platforms import get_platform
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import WHOLE_UNDER_TP, give_experts, write_coin_task
from tests.e2e.commands import argv_rl, succeed

pytestmark = [pytest.mark.timeout(600)]

SIZE = ("train.prompts_per_step=8", "train.mini_batch_prompts=4", "rollout.group_size=4", "train.steps=2")
SIZE += ("data.max_prompt_tokens=300", "rollout.max_response_tokens=200", "rollout.protocol=retool")
SIZE += ("optim.lr=1e-5", "validation.every=0", "checkpoint.every_steps=0", "checkpoint.export=false")
TWO_RANKS = ("cluster.gpus_per_node=2", *WHOLE_UNDER_TP)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("algorithm.router_replay=R3",), id="R3"),
        pytest.param(("algorithm.router_replay=R3", "train.mode=partial_rollout"), id="R3-partial_rollout"),
        pytest.param(("algorithm.router_replay=R2",), id="R2"),
        pytest.param(("algorithm.router_replay=R3", *TWO_RANKS), id="R3-whole_experts_under_tp"),
    ],
)
def test_the_engines_experts_are_the_actors(tmp_path: Path, mark: str, settings: tuple[str, ...]):
    get_platform("cpu").activate()
    task = write_coin_task(tmp_path, calls=True)
    give_experts(tmp_path / "model")
    succeed(argv_rl(f"run.root={tmp_path}", "run.name=rl", *task, *SIZE, *settings), mark, timeout_s=500)
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["behavior/calls"] > 0 and row["rollout/dropped"] == 0
        assert 1 < row["experts/load_max_over_mean"] <= 2
        assert {"experts/load_max_over_mean/layer_0", "experts/unused"} <= set(row)
        assert math.isfinite(row["actor/pg_loss"]) and row["actor/grad_norm"] > 0
    if "train.mode=partial_rollout" not in settings:  # there, other weights have sampled some tokens
        assert max(row["training/rollout_probs_diff_max"] for row in rows) <= 1e-4
