"""[reward] of a configuration, as verl reads it and its reward manager calls our function."""

import json
from typing import Any

import pytest

from tests.forked import run_scenario

SETTINGS = {
    "all": [
        "reward.call_bonus=[0.1, -0.6]",
        "reward.overlong_buffer_tokens=40",
        'reward.require=["format"]',
    ],
    "own": ["reward.function=configs.examples.reward:score"],
}


@pytest.fixture(scope="module")
def verls() -> dict[str, dict[str, dict[str, Any]]]:
    return run_scenario("tests.parity.verl_reward_scenario", json.dumps(SETTINGS))


def rewards(verls: dict[str, dict[str, dict[str, Any]]], setting: str) -> list[float]:
    return [each["reward_score"] for each in verls[setting].values()]


def test_all_options_add_up_and_keep_the_answers_verdict(verls: dict[str, Any]):
    # 150 tokens are 30 into the last 40 of 160; a malformed call makes a right answer worth a wrong
    # one with its bonus
    assert rewards(verls, "all") == pytest.approx([1.0, -0.9, -0.8, -0.6 - 0.75])
    infos = [each["reward_extra_info"] for each in verls["all"].values()]
    assert [info["acc"] for info in infos] == [1.0, 1.0, 0.0, 0.0]
    assert [info["format_ok"] for info in infos] == [1.0, 0.0, 1.0, 1.0]
    assert infos[3]["reward_overlong"] == pytest.approx(-0.75)
    parts = ("reward_answer", "reward_calls", "reward_overlong")
    assert [sum(info[part] for part in parts) for info in infos] == pytest.approx(rewards(verls, "all"))


def test_a_function_of_ones_own_scores_in_place_of_ours_and_its_parts_are_kept(verls: dict[str, Any]):
    assert rewards(verls, "own") == [0.75, 0.75, -1.0, -1.0], "its example takes a quarter where no call ran"
    infos = [each["reward_extra_info"] for each in verls["own"].values()]
    assert [info["acc"] for info in infos] == [1.0, 1.0, 0.0, 0.0]
    assert [info["reward_answer_part"] for info in infos] == [1.0, 1.0, -1.0, -1.0]
    assert [info["reward_unsure"] for info in infos] == [-0.25, -0.25, 0.0, 0.0]
