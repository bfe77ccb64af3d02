"""The nodes of a Ray cluster, as a run that starts again meets them: lost, late, or different."""

import time
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.preflight import cluster

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"
TWO = load_config(RlConfig, RL, ["cluster.nodes=2", "cluster.gpus_per_node=1"])
JOINED = "ok: 2 joined, 1 GPU required on each"
SAME = [({"host": "a", "code": "1"}, 0.0), ({"host": "b", "code": "1"}, 0.0)]


def node(name: str) -> dict[str, Any]:
    return {"Alive": True, "NodeManagerAddress": name, "NodeID": name, "Resources": {"GPU": 1.0}}


@pytest.fixture
def ray_sees(monkeypatch: pytest.MonkeyPatch):
    """Ray's nodes, a list for each time that it is asked; the last one stays. What a look finds."""
    import ray

    def see(*lists: list[dict[str, Any]], looks: list[Any]) -> list[str]:
        asked, looked = list(lists), list(looks)

        def look_at(nodes: list[dict[str, Any]], config: RlConfig) -> Any:
            found = looked.pop(0) if len(looked) > 1 else looked[0]
            if isinstance(found, Exception):
                raise found
            return [(prints, time.time()) for prints, _ in found]

        monkeypatch.setattr(ray, "nodes", lambda: asked.pop(0) if len(asked) > 1 else asked[0])
        monkeypatch.setattr(cluster, "_query_nodes", look_at)
        monkeypatch.setattr(cluster, "RETRY_S", 0.01)
        return [f"{each.severity}: {each.text}" for each in cluster._check_nodes(TWO, get_platform("cpu"), 2.0)]

    return see


def lost() -> Exception:
    from ray.exceptions import TaskUnschedulableError

    return TaskUnschedulableError("The node was dead")


def test_a_node_that_joins_late_is_awaited(ray_sees: Any):
    assert ray_sees([node("a")], [node("a"), node("b")], looks=[SAME])[0] == JOINED


def test_a_lost_node_that_ray_still_counts_is_none(ray_sees: Any):
    both = [node("a"), node("b")]
    assert ray_sees(both, both, looks=[lost(), SAME])[0] == JOINED, "the query found the dead node"
    assert ray_sees([*both, node("lost")], both, looks=[SAME])[0] == JOINED, "the new one came first"
    dead = node("dead") | {"Alive": False}
    assert ray_sees([*both, dead], looks=[SAME])[0] == JOINED


def test_what_stays_wrong_is_told(ray_sees: Any):
    both = [node("a"), node("b")]
    assert "1 joined within 2 s (a)" in ray_sees([node("a")], looks=[SAME])[0]
    assert "a node cannot run the check: " in ray_sees(both, looks=[lost()])[0]
    other = [({"host": "a", "optim.lr": "0.1"}, 0.0), ({"host": "b", "optim.lr": "0.2"}, 0.0)]
    assert "error: optim.lr is 0.1 on a and 0.2 on b. Make them the same on every node." in ray_sees(
        both, looks=[other]
    )
    more = {**node("b"), "Resources": {"GPU": 2.0}}
    assert ray_sees([node("a"), more], looks=[SAME])[0].startswith("error: b has 2 GPU in Ray")


def test_a_clock_is_wrong_if_it_is_outside_of_the_time_of_the_question():
    def wrong(clock_s: float) -> list[str]:
        found = cluster._compare([({"host": "a"}, clock_s)], 100.0, 110.0)
        return [each.text for each in found if each.severity == "warning"]

    assert wrong(109.0) == wrong(101.0) == [] and "differs by 10.0 s" in wrong(120.0)[0] and wrong(98.0)
