"""Our SGLang server under Ray, and the workers that are created while the model is built."""

from typing import Any

import pytest

from tests.scenario import run_scenario


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_scenario("tests.engine.servers_scenario")


def test_each_replica_has_its_own_seed_though_verl_gives_all_the_same_settings(found: dict[str, Any]):
    assert found["seeds"] == [7, 8, 9, 7]


def test_verl_gets_the_server_whose_process_started_early_and_its_constructors_error(found: dict[str, Any]):
    assert found["servers"]["early"] == [True, False]
    early, other = found["servers"]["errors"]
    assert "unexpected keyword argument 'unknown'" in early and "unexpected keyword argument 'unknown'" in other


def test_the_router_has_imported_the_server_before_it_gets_engines(found: dict[str, Any]):
    assert found["loops"]["router"] == [True, "address", True]


def test_verl_gets_the_agent_loops_worker_that_has_opened_the_sandbox(found: dict[str, Any]):
    assert found["loops"]["same"]
    assert found["loops"]["report"] == [
        [{"actor_rollout_ref": {"rollout": {}, "model": {}}}, "client", None, []],
        True,
        True,
    ]
