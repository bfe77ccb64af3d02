"""A server that starts before its settings exist is the one that verl then finds by its name."""

from __future__ import annotations

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


def test_an_engine_with_gpus_of_its_own_has_one_too(found: dict[str, Any]):
    """Four GPUs of eight for engines of two each."""
    assert found["async"] == [0, 1]


def test_none_starts_where_its_node_is_not_known_yet(found: dict[str, Any]):
    assert found["two_nodes"] == []


def test_each_replica_has_a_seed_of_its_own_though_verl_hands_all_the_same_settings(found: dict[str, Any]):
    assert found["seeds"] == [7, 8, 9, 7]
