"""One check finds every mistake that needs no device, in a dry run as at a start."""

from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import read_rows
from retool_mcore.platforms import get_platform
from retool_mcore.preflight import inputs
from retool_mcore.preflight.check import CheckScope, _checks, check
from tests.unit.preflight.test_preflight import RL, good

ELSEWHERE = CheckScope(platform=get_platform("cpu"), is_target=False)
MISTAKES = """
from retool_mcore.rollout.tools import Tool

def of_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def without_result(response): pass
def of_extra_info(response): return float(response.extra_info["level"])
def of_first(response): return 10 * float(response.truth) + len(response.data_source)
def of_behavior(response): return float(response.behavior["calls"] - response.behavior["calls_ok"])

class Plain(Tool):
    name, description, parameters = "plain", "d", {"type": "object"}
    def call(self, arguments, state): return "x"

class Nameless(Tool):
    async def call(self, arguments, state): return "x"
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_mistakes.py").write_text(MISTAKES)
    monkeypatch.syspath_prepend(tmp_path)


def wrong(config: RlConfig) -> list[str]:
    return [each.text for each in check(config, ELSEWHERE) if each.severity == "error"]


def test_a_reward_is_called_with_the_first_row_and_what_a_trajectory_did(task: Path):
    def found(name: str, *more: str) -> list[tuple[str, str]]:
        run = good(task, f"reward.function=own_mistakes:{name}", *more)
        return [(each.severity, each.text) for each in inputs.reward(run)]

    row = next(read_rows(task / "rl_train.parquet", ("data_source", "reward_model")))[1]
    score = 10 * float(row["reward_model"]["ground_truth"]) + len(row["data_source"])
    assert found("of_first") == [("ok", f"own_mistakes:of_first scores a response: {score:g}")]
    assert found("of_behavior") == [("ok", "own_mistakes:of_behavior scores a response: 0")]
    (made_up,) = found("of_extra_info", "data.train_file=absent.parquet")
    assert made_up[0] == "note" and made_up[1].endswith("The row was made up, because data.train_file does not exist")


@pytest.mark.parametrize(
    ("override", "messages"),
    [
        ("run.seed=1", []),
        ('rollout.tools=["nothing"]', ['rollout.tools = "nothing" is not of the form "module:name"']),
        (
            'rollout.tools=["code_interpreter", "own_mistakes:Plain", "own_mistakes:Nameless"]',
            ["call of Plain is not async. Write: async def call(", "Nameless has no name"],
        ),
        ("reward.function=math:sqrt", ["the function raised TypeError: must be real number, not Response"]),
        ("reward.function=own_mistakes:of_verl", ["cannot be called with one response"]),
        ("reward.function=own_mistakes:without_result", ["score = None. Every part must be a finite number"]),
        ("reward.function=own_mistakes:of_extra_info", ["the function raised KeyError: 'level'"]),
        ("data.train_file={task}/sft_train.parquet", ["no column data_source, prompt, reward_model; it has messages"]),
    ],
)
def test_each_mistake_is_one_line(task: Path, override: str, messages: list[str]):
    found = wrong(good(task, override.replace("{task}", str(task))))
    assert len(found) == len(messages), found
    assert all(message in text and "\n" not in text for message, text in zip(messages, found, strict=True)), found


def test_a_wrong_value_is_an_error_without_model_and_data():
    settings, reward = wrong(load_config(RlConfig, RL, ["memory.offload_idle=true", "reward.function=math:sqrt"]))
    assert "memory.offload_idle" in settings and "math:sqrt" in reward


SETTINGS, MACHINE = ["settings", "stall"], ["versions", "devices", "disk", "host memory", "sockets"]
INPUTS = ["model", "tools", "reward", "tokenizer", "data"]
SLOW = ["shared memory", "open files", "patch"]


@pytest.mark.parametrize(
    ("scope", "nodes", "names"),
    [
        ({"is_target": False}, 1, SETTINGS + INPUTS),
        ({}, 2, SETTINGS + MACHINE + INPUTS + ["sandbox"]),
        ({"thorough": True}, 1, SETTINGS + MACHINE + SLOW + INPUTS + ["sandbox"]),
        ({"thorough": True, "data": False}, 2, SETTINGS + MACHINE + SLOW + ["network"] + INPUTS[:-1] + ["sandbox"]),
    ],
)
def test_each_command_makes_its_checks_in_order(scope: dict[str, bool], nodes: int, names: list[str]):
    chosen = CheckScope(platform=get_platform("cpu"), **scope)
    checks: dict[str, Any] = dict(_checks(load_config(RlConfig, RL, [f"cluster.nodes={nodes}"]), chosen))
    assert list(checks) == names
    here, slow = chosen.is_target, chosen.thorough
    wanted = {"versions": {"extras": slow}, "model": {"fetch": here}, "data": {"all_rows": here, "render": slow}}
    assert {name: check.keywords for name, check in checks.items() if check.keywords} == {
        name: keywords for name, keywords in wanted.items() if name in names
    }
