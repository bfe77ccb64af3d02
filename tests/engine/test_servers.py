"""Our SGLang replicas under verl."""

from tests.forked import run_scenario


def test_each_replica_has_its_own_seed_though_verl_gives_all_the_same_settings():
    assert run_scenario("tests.engine.servers_scenario") == [7, 8, 9, 7]
