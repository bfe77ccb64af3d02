"""Our SGLang server under Ray, and the workers that are created while the model is built."""

from typing import Any

import pytest

from tests.scenario import run_scenario


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_scenario("tests.verl.servers_scenario")


def test_what_controls_an_engine_does_not_wait_behind_its_requests(found: dict[str, Any]):
    """80 requests wait in Ray for a place, and polls and the abort are answered all the same."""
    assert found["started of 100 in 20"] == 20


def test_no_request_of_training_waits_in_ray_where_nobody_counts_it(found: dict[str, Any]):
    assert found["started of 1536"] == 1536


def test_a_server_has_room_for_all_of_them(found: dict[str, Any]):
    assert found["room"] == 1536


def test_every_other_call_of_verls_to_a_server_controls_it(found: dict[str, Any]):
    """A start, and what it asks before a server has any request, may wait."""
    assert found["behind"] == ["generate", "launch_server", "set_pd_peer"]


def test_its_http_server_answers_only_who_knows_the_runs_key(found: dict[str, Any]):
    assert len(found["answers"]) == 4
    for without, wrong, right in found["answers"].values():
        assert (without, wrong) == (401, 401)
        assert right not in (401, 403)


def test_each_replica_has_its_own_seed_though_verl_gives_all_the_same_settings(found: dict[str, Any]):
    assert found["seeds"] == [7, 8, 9, 7]


def test_a_server_warms_up_with_one_request_and_empties_its_cache(found: dict[str, Any]):
    """What the first request compiles is compiled before a trajectory asks; adapters come later."""
    assert found["launch"] == [["8 tokens", "flush"], []]


def test_verl_gets_the_agent_loops_worker_that_has_opened_the_sandbox(found: dict[str, Any]):
    assert found["loops"]["same"]
    assert found["loops"]["told"] == [[{"a": 1}, "client", None, []], True, True]
