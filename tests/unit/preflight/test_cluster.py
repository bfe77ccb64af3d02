"""The nodes of a Ray cluster, as a run that starts again meets them: lost, late, or different."""

import time
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.preflight import cluster
from tests.unit.preflight.test_preflight import RL

TWO = load_config(RlConfig, RL, ["cluster.nodes=2", "cluster.gpus_per_node=1"])
JOINED = "ok: 2 joined, 1 GPU required on each"
SAME = [{"host": "a", "code": "1"}, {"host": "b", "code": "1"}]
OTHER = [{"host": "a", "optim.lr": "0.1"}, {"host": "b", "optim.lr": "0.2"}]
LOST = "a node that Ray still counts"


def node(name: str, gpus: float = 1.0, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerAddress": name, "NodeID": name, "Resources": {"GPU": gpus}}


BOTH = [node("a"), node("b")]


@pytest.mark.parametrize(
    ("lists", "looks", "finding"),
    [
        ([[node("a")], BOTH], [SAME], JOINED),  # the second comes late
        ([BOTH, BOTH], [LOST, SAME], JOINED),
        ([[*BOTH, node("lost")], BOTH], [SAME], JOINED),  # the new one comes before Ray misses the lost one
        ([[*BOTH, node("dead", alive=False)]], [SAME], JOINED),
        ([[node("a")]], [SAME], "error: 1 joined within 2 s (a), but cluster.nodes = 2. "),
        ([BOTH], [LOST], "error: a node cannot run the check: "),
        ([BOTH], [OTHER], "error: optim.lr is 0.1 on a and 0.2 on b. Make them the same on every node."),
        ([[node("a"), node("b", 2.0)]], [SAME], "error: b has 2 GPU in Ray"),
    ],
)
def test_late_nodes_are_awaited_and_what_stays_wrong_is_told(
    lists: list[list[dict[str, Any]]], looks: list[Any], finding: str, monkeypatch: pytest.MonkeyPatch
):
    """Ray's nodes, and what a look at them finds, for each time; the last one stays."""
    import ray
    from ray.exceptions import TaskUnschedulableError

    asked, looked = list(lists), list(looks)

    def look_at(nodes: list[dict[str, Any]], config: RlConfig) -> Any:
        found = looked.pop(0) if len(looked) > 1 else looked[0]
        if found is LOST:
            raise TaskUnschedulableError("The node was dead")
        return [(prints, time.time()) for prints in found]

    monkeypatch.setattr(ray, "nodes", lambda: asked.pop(0) if len(asked) > 1 else asked[0])
    monkeypatch.setattr(cluster, "_query_nodes", look_at)
    monkeypatch.setattr(cluster, "RETRY_S", 0.01)
    found = [f"{each.severity}: {each.text}" for each in cluster._check_nodes(TWO, get_platform("cpu"), 2.0)]
    problems = [each for each in found if each.startswith("error")]
    assert (problems or found)[0].startswith(finding)


def test_a_clock_is_wrong_if_it_is_outside_of_the_time_of_the_question():
    def wrong(clock_s: float) -> list[str]:
        found = cluster._compare([({"host": "a"}, clock_s)], 100.0, 110.0)
        return [each.text for each in found if each.severity == "warning"]

    assert wrong(109.0) == wrong(101.0) == [] and "differs by 10.0 s" in wrong(120.0)[0] and wrong(98.0)
