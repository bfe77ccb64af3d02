"""Our loop before a real vLLM, through verl's own server and verl's own way of weights, on a CPU.

It has an environment of its own: `make test-ascend`. What it shows of platform ascend is the seam
between verl's vLLM server and our loop; vllm-ascend, its graphs and its devices are not in it.
"""

import importlib.util
from typing import Any

import pytest

from tests.scenario import run_scenario

GAP = 1e-4  # of log-probabilities, float32 in both

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-ascend"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("tests.nightly.ascend.vllm_scenario", tmp_path_factory.mktemp("vllm"), timeout_s=840)


def test_a_turn_stops_at_the_last_token_of_its_call(found: dict[str, Any]):
    called, (call, answer) = found["called"], found["called"]["taught"]
    assert called["stop"] == "finished" and called["turns"] == [len(call), len(answer)]
    assert called["ids"][: len(call)] == call and called["ids"][-len(answer) :] == answer
    assert called["mask"] == [1] * len(call) + [0] * called["between"] + [1] * len(answer)
    assert (called["shown"], called["answer"]) == (["1379"], "1379")


def test_a_turn_that_fills_its_budget_ends_by_length(found: dict[str, Any]):
    assert (found["length"]["stop"], len(found["length"]["ids"])) == ("length", 24)


@pytest.mark.parametrize("name", ["length", "interrupted", "called"])
def test_log_probabilities_are_those_of_a_forward_pass(found: dict[str, Any], name: str):
    assert found[name]["gap"] < GAP
    if name != "called":  # a taught response is sure
        assert min(found[name]["logprobs"]) < -1


def test_a_turn_continues_after_a_weight_sync_with_the_version_of_each_token(found: dict[str, Any]):
    interrupted = found["interrupted"]
    assert interrupted["aborted"] == 1 and interrupted["error"] is None
    assert interrupted["versions"] == sorted(interrupted["versions"])
    assert set(interrupted["versions"]) == {1, 2} and interrupted["versions"].count(1) >= 20
    assert (interrupted["stop"], len(interrupted["ids"])) == ("length", 700)
    assert interrupted["crossed"] > 10 * GAP, "the other version of a token would show"
