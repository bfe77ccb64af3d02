"""Dropped trajectories are in no group and are counted; too many stop the run."""

import json
from typing import Any

import pytest

from tests.scenario import run_scenario


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    found = run_scenario("tests.engine.replay_scenario", folder)
    rows = [json.loads(line) for line in (folder / "trajectories" / "trajectories.jsonl").read_text().splitlines()]
    return {**found, "rows": rows}


def keys(**sessions: str) -> list[str]:
    return [f"{uid}_{session}_0" for uid, each in sessions.items() for session in each]


def test_a_whole_batch_is_passed_on_and_measured(scenarios: dict[str, Any]):
    whole = scenarios["whole"]
    assert (whole["keys"], whole["left"]) == (keys(a="0123", b="0123"), [])
    metrics = {
        "rollout/dropped": 0,
        "accuracy": 0.25,
        "behavior/code_ratio": 0.25,
        "behavior/correct_code_fraction": 1.0,
        "behavior/turns": 1.25,
        "groups/all_right": 0.0,
        "groups/all_wrong": 0.5,
        "groups/same_reward": 0.5,
        "length/finished/p50": 2,
    }
    assert {name: whole["metrics"][name] for name in metrics} == metrics
    assert "accuracy/low" not in whole["metrics"]


def test_a_dropped_trajectory_is_counted_and_in_no_group(scenarios: dict[str, Any]):
    one = scenarios["one dropped"]
    assert one["keys"] == keys(c="013", d="0123")
    assert one["metrics"]["rollout/dropped"] == 1
    assert one["metrics"]["accuracy"] == pytest.approx(4 / 7)


def test_a_trajectory_that_lost_its_group_is_left_out(scenarios: dict[str, Any]):
    lonely = scenarios["one of a group left"]
    assert (lonely["keys"], lonely["metrics"]["rollout/dropped"], lonely["left"]) == (keys(f="0123"), 3, [])


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("too many", "1 of 8 trajectories of step 1 (train) were dropped (12.5%), more than rollout.max_dropped"),
        ("too many", "max_dropped_fraction = 10.0%"),
        ("too many in validation", "1 of 2 trajectories of step 1 (val) were dropped (50.0%)"),
        ("all failed", "All 8 trajectories of step 1 (train) failed with TypeError: wait() got 'initial'. The log"),
        ("failed too often", "3 of 8 trajectories of step 1 (train) were dropped (37.5%)"),  # of several looks
        ("filtered in vain", "The limit is 4: algorithm.filter_groups (10 if it is 0)"),
    ],
)
def test_too_many_drops_or_replacements_stop_the_run(scenarios: dict[str, Any], scenario: str, message: str):
    assert message in scenarios[scenario]["error"]


def test_a_validations_metrics_are_named_after_it_and_have_an_interval(scenarios: dict[str, Any]):
    found = scenarios["validation"]["metrics"]
    assert (found["val/accuracy"], found["val/rollout/dropped"]) == (0.75, 0)
    assert (found["val/accuracy/low"], found["val/accuracy/high"]) == (pytest.approx(0.26), 1.0)


def test_groups_have_the_same_reward_if_their_shaped_rewards_are_equal(scenarios: dict[str, Any]):
    metrics = scenarios["shaped"]["metrics"]
    assert (metrics["groups/all_wrong"], metrics["groups/same_reward"]) == (1.0, 0.5)


def test_recorded_groups_are_written_whole_with_their_advantages(scenarios: dict[str, Any]):
    rows = scenarios["rows"]
    assert [row["key"] for row in rows] == keys(a="0123")
    assert [(row["step"], row["partition"], row["truth"]) for row in rows] == [(1, "train", "7")] * 4
    assert [row["reward"] for row in rows] == [row["advantage"] for row in rows] == [1.0, -1.0, 1.0, -1.0]
    for row in rows:
        assert (row["prompt_ids"], row["response_ids"], row["loss_mask"]) == ([1, 2, 3], [4, 5], [1, 1])
        assert (row["logprobs"], row["actor_logprobs"]) == ([-0.5, -0.25], [-0.75, -0.25])


def test_dynamic_sampling_replaces_groups_that_teach_nothing(scenarios: dict[str, Any]):
    filtered = scenarios["filtered"]
    chosen = {key.split("_")[0] for key in filtered["keys"]}
    assert len(filtered["keys"]) == 8 and len(chosen) == 2 and chosen <= {"j", "k1", "k2"}
    assert filtered["refilled"] == 2  # verl asks for two for each group it evicts, and throws the surplus away
    metrics = {
        "training/filter_groups/discarded_surplus_samples": 1,
        "training/filter_groups/evicted_samples": 1,
        "rollout/dropped": 0,
        "rollout/refilled_prompts": 2,
        "groups/all_right": 0.25,  # i; j, k1 and k2 were mixed, and one of them not needed
        "groups/all_wrong": 0.0,
    }
    assert {name: filtered["metrics"][name] for name in metrics} == metrics
    assert filtered["left"] == []


def test_a_trajectory_that_failed_counts_where_verl_replaces_its_group(scenarios: dict[str, Any]):
    """One of "p" failed, then one of "r" in its place, now "k7"'s. An outage took one of "q"."""
    failed = scenarios["failed"]
    assert sorted({key.split("_")[0] for key in failed["keys"]}) == ["k7", "q"]
    assert (failed["metrics"]["rollout/dropped"], failed["metrics"]["rollout/refilled_prompts"]) == (3, 2)
    for name in ("after failed", "after failed too often"):
        assert scenarios[name]["metrics"]["rollout/dropped"] == 1, "none of the step before"


def test_a_resume_carries_no_trajectory_whose_prompt_is_gone(scenarios: dict[str, Any]):
    assert scenarios["resumed"] == [["u", "u_0_0"]] * 2


def test_a_curriculum_gets_each_group_once_even_if_the_filter_removes_it(scenarios: dict[str, Any]):
    right, wrong = True, False
    assert scenarios["whole"]["answers"] == [[0, [right, wrong, right, wrong]], [1, [wrong] * 4]]
    assert scenarios["one dropped"]["answers"][0] == [2, [right, wrong, wrong]]
    removed, *taken = scenarios["filtered"]["answers"]
    assert removed == [ord("i") - ord("a"), [right] * 4]
    assert len(taken) == 2 and all(sum(each) in (2, 3) for _, each in taken)
    assert scenarios["filtered, a group empty"]["answers"] == [[ord("m") - ord("a"), [wrong, right, right, right]]]
