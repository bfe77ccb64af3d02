"""The mismatch of engine and actor over many tokens, intervals, and records of trajectories."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retool_mcore.rollout.records import RecordWriter
from retool_mcore.verl import measure
from retool_mcore.verl.measure import _token_columns, accuracy_interval, mismatch, write_groups


def test_the_mismatch_is_that_of_plain_python():
    draw = random.Random(0)
    actor = [draw.gauss(-1.0, 0.5) for _ in range(10_007)]
    rollout = [value + draw.gauss(0.001, 0.02) for value in actor]
    sizes = sorted(abs(a - b) for a, b in zip(rollout, actor, strict=True))
    found = mismatch(torch.tensor(actor, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64))
    assert found == {"mismatch/max": sizes[-1], "mismatch/p99": sizes[math.ceil(0.99 * len(sizes)) - 1]}


@pytest.mark.parametrize(
    ("right", "low", "high"),
    [([1, 1, 1, 0], 0.26, 1.0), ([0] * 4, 0.0, 0.4899), ([1] * 4, 0.5101, 1.0)],
)
def test_an_accuracy_has_the_interval_of_its_problems(right: list[int], low: float, high: float):
    """Four problems of two answers each; as eight trials of their own it would be narrower. For 0
    and 1: statsmodels.stats.proportion.proportion_confint(0 or 4, 4, method="wilson").
    """
    extras = [{"reward_extra_info": {"acc": right[row]}} for row in range(4) for _ in range(2)]
    keys = [f"{row}-x_{answer}_0" for row in range(4) for answer in range(2)]
    wanted = {"accuracy/low": pytest.approx(low, abs=1e-4), "accuracy/high": pytest.approx(high, abs=1e-4)}
    assert accuracy_interval(keys, extras) == wanted
    assert accuracy_interval(keys[:2], extras[:2]) == {}


def test_each_validation_writes_the_same_problems_whatever_verl_calls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def of_queue(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        return {name: torch.ones(len(keys), 2) for name in select_fields}

    monkeypatch.setattr(measure, "tq", SimpleNamespace(kv_batch_get=of_queue))
    extras = [{"row": row, "behavior": {}, "record": {"prompt": f"problem {row}"}} for row in range(8)]

    def written(partition_id: str, names: str) -> list[str]:
        keys = [f"{name}_0_0" for name in names]
        to = {"partition_id": partition_id, "step": 1, "groups": 2, "seed": 0}
        return sorted(row["prompt"] for row in write_groups(RecordWriter(tmp_path), keys, extras, **to))

    assert written("val", "abcdefgh") == written("val", "mnopqrst") == written("val", "hgfedcba")
    assert written("train", "abcdefgh") != written("train", "hgfedcba"), "a step's are drawn anew"


def test_a_record_has_each_column_and_one_advantage_if_all_tokens_in_the_loss_share_it():
    lists = {"rm_scores": [0.25, 0.0, 0.5], "prompts": [1, 2], "responses": [3, 4, 5], "response_mask": [1, 0, 1]}
    row = {name: torch.tensor(each) for name, each in (lists | {"rollout_log_probs": [-0.1234567, 0.0, -0.25]}).items()}
    columns = {"reward": 0.75, "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "loss_mask": [1, 0, 1]}
    columns |= {"logprobs": [-0.123457, 0.0, -0.25], "actor_logprobs": None, "advantage": None}
    assert _token_columns(row) == columns
    row["old_log_probs"] = torch.tensor([-0.75, 0.0, -1.5])
    for values, advantage in (([2.0, 9.0, 2.0], 2.0), ([2.0, 9.0, 3.0], [2.0, 0.0, 3.0])):
        found = _token_columns(row | {"advantages": torch.tensor(values)})
        assert found == columns | {"actor_logprobs": [-0.75, 0.0, -1.5], "advantage": advantage}
