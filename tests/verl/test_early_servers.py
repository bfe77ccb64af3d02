"""A server that starts before its settings exist is the one that verl then finds by its name."""

from typing import Any

import pytest

from tests.scenario import run_scenario


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_scenario("tests.verl.early_servers_scenario")


def test_verl_gets_the_early_server_with_its_settings_and_environment(found: dict[str, Any]):
    assert found["one_node"] == [0, 1]
    assert found["before"] == [{}, None]
    assert found["after"] == [{"replica_rank": 1}, "here"]
    assert found["same"]


def test_what_controls_an_engine_does_not_wait_behind_its_requests(found: dict[str, Any]):
    """80 requests wait in Ray for a place, and polls and the abort are answered all the same."""
    assert found["started of 100 in 20"] == 20


def test_no_request_of_training_waits_in_ray_where_nobody_counts_it(found: dict[str, Any]):
    assert found["started of 1536"] == 1536


def test_early_servers_and_those_that_verl_starts_have_room_for_all_of_them(found: dict[str, Any]):
    assert found["room"] == [1536, 1536]


def test_every_other_call_of_verls_to_a_server_controls_it(found: dict[str, Any]):
    """A start, and what it asks before a server has any request, may wait."""
    assert found["behind"] == ["generate", "launch_server", "set_pd_peer"]


def test_its_http_server_answers_only_who_knows_the_runs_key(found: dict[str, Any]):
    assert len(found["answers"]) == 4
    for without, wrong, right in found["answers"].values():
        assert (without, wrong) == (401, 401)
        assert right not in (401, 403)


def test_an_engine_with_gpus_of_its_own_has_one_too(found: dict[str, Any]):
    """Four GPUs of eight for engines of two each."""
    assert found["async"] == [0, 1]


def test_none_starts_where_its_node_is_not_known_yet(found: dict[str, Any]):
    assert found["two_nodes"] == []


def test_each_replica_has_a_seed_of_its_own_though_verl_hands_all_the_same_settings(found: dict[str, Any]):
    assert found["seeds"] == [7, 8, 9, 7]


def test_a_servers_first_request_is_its_own_and_leaves_nothing_in_the_cache(found: dict[str, Any]):
    """What the first request compiles is compiled before a trajectory asks; adapters come later."""
    assert found["launch"] == [["8 tokens", "flush"], []]


def test_verl_gets_the_early_agent_loops_with_sandbox_and_engine_class_at_hand(found: dict[str, Any]):
    assert found["loops"]["same"]
    assert found["loops"]["told"] == [[{"a": 1}, "client", None, []], True, True]
