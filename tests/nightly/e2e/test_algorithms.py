"""PPO with a critic, two steps on the real engines.

The model tosses a coin (coin_model.py), so what each part does to a batch is known beforehand.
"""

import json
import math
from pathlib import Path

import pytest

from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import argv_rl, succeed

pytestmark = [pytest.mark.timeout(600)]

SIZE = ("train.prompts_per_step=8", "train.mini_batch_prompts=8", "rollout.group_size=2")


def train(root: Path, mark: str, *settings: str) -> list[dict[str, float]]:
    """Run to the end; the metrics of its steps."""
    succeed(argv_rl(f"run.root={root}", "run.name=rl", *settings), mark, timeout_s=500)
    return read_metrics(root / "rl" / "metrics.jsonl")


def trajectories(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "rl" / "trajectories" / "trajectories.jsonl").open()]


def test_ppo_with_a_critic_on_the_papers_protocol_resumes_on_another_layout(tmp_path: Path, mark: str):
    """Its checkpoints are written by separate processes; the first, of one rank, is read
    by two.
    """
    task = write_coin_task(tmp_path, calls=True)
    settings = (*task, *SIZE, "algorithm.name=ppo", "critic.lr=1e-3", "rollout.protocol=retool")
    settings += ("algorithm.kl_coef=0.01", "reward.function=configs.examples.reward:score")
    settings += ("validation.every=0", "checkpoint.every_steps=1")
    settings += ("checkpoint.reshardable=true", "checkpoint.asynchronous=true", "rollout.record_groups=8")
    # Every prompt alone has more than 240 tokens: without "auto" verl refuses them, in each of the
    # three models.
    settings += ("data.max_prompt_tokens=260", "memory.recompute=auto", "train.micro_batch_tokens=230")
    [first] = train(tmp_path, mark, *settings, "train.steps=1")
    [saved] = complete_checkpoints(tmp_path / "rl/checkpoints")
    assert saved.layout["tp"] == 1 and (saved.path / "critic").is_dir()
    rows = train(tmp_path, mark, *settings, "train.steps=2", "cluster.gpus_per_node=2", "parallel.tp=2")
    assert len(complete_checkpoints(tmp_path / "rl/checkpoints")) == 2, "the last save is waited for"
    assert rows[0] == first and [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert math.isfinite(row["actor/pg_loss"]) and row["rollout/dropped"] == 0
        assert {"rollout_corr/kl", "mismatch/max", "mismatch/p99"} <= set(row) and row["memory_gib"] > 0.1
        assert 0.0 < row["engine/cache_hit_rate"] < 1.0, "a group's responses share their prompt"
        assert row["critic/rewards/mean"] == pytest.approx(row["reward/answer_part"] + row["reward/unsure"])
        assert row["critic/vf_loss"] > 0 and row["timing_s/update_critic"] > 0
        assert row["mismatch/max"] <= 1e-4, "float32 engine and actor agree"
    # The coin is fair before the first update only: a call costs tokens, and one update may unlearn
    # it.
    assert rows[0]["behavior/calls"] > 0, "half of the trajectories start with a call"
    # Before the first update the actor is its own reference; after it, it is not.
    assert abs(rows[0]["actor/kl_loss"]) <= 1e-6 < rows[1]["actor/kl_loss"]
    calls = [turn for row in trajectories(tmp_path) for turn in row["turns"] if turn["kind"] == "tool_call"]
    assert calls and all(turn["text"].endswith("</code>") for turn in calls)
    assert {result["shown"] for turn in calls for result in turn["results"]} <= {"7", "7\n7"}
    assert rows[0]["tool/latency_s/p99"] > 0.0
    assert 0.0 <= rows[0]["tool/queue_s/p99"] < rows[0]["tool/latency_s/p99"]
    assert all(len(row["advantage"]) == len(row["response_ids"]) for row in trajectories(tmp_path)), "GAE's, by token"
