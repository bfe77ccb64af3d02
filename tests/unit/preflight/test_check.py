"""One check finds every mistake that needs no device, in a dry run as at a start."""

from dataclasses import replace
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.preflight.check import CheckScope, _findings, check
from retool_mcore.preflight.findings import missing
from tests.unit.preflight.test_preflight import RL, good, settings, task  # noqa: F401  a fixture

ELSEWHERE = CheckScope(platform=get_platform("cpu"), is_target=False)
MISTAKES = """
from retool_mcore.rollout.tools import Tool

def of_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def without_result(response): pass
def of_extra_info(response): return float(response.extra_info["level"])
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


def wrong(config: RlConfig, here: CheckScope = ELSEWHERE) -> list[str]:
    return [each.text for each in check(config, here) if each.severity == "error"]


def test_a_good_run_has_no_mistake(task: Path):
    assert wrong(good(task)) == []


def test_a_reward_that_reads_what_a_trajectory_did_is_good(task: Path):
    assert wrong(good(task, "reward.function=own_mistakes:of_behavior")) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('rollout.tools=["nothing"]', ['rollout.tools = "nothing" is not of the form "module:name"']),
        ('rollout.tools=["own_mistakes:Plain"]', ["call of Plain is not async. Write: async def call("]),
        (
            'rollout.tools=["code_interpreter", "own_mistakes:Plain", "own_mistakes:Nameless"]',
            ["call of Plain is not async", "Nameless has no name"],
        ),
        ("reward.function=math:sqrt", ["the function raised TypeError: must be real number, not Response"]),
        ("reward.function=own_mistakes:of_verl", ["cannot be called with one response", "def score(response)"]),
        (
            "reward.function=own_mistakes:without_result",
            ["the result has score = None. Every part must be a finite number"],
        ),
        ("reward.function=own_mistakes:of_extra_info", ["the function raised KeyError: 'level'"]),
    ],
)
def test_a_mistake_in_own_code_is_one_line_each(task: Path, override: str, message: list[str]):
    found = wrong(good(task, override))
    assert all(text in " ".join(found) for text in message), found
    assert all("\n" not in text for text in found)


def test_a_file_for_sft_is_no_file_for_rl(task: Path):
    (text,) = wrong(good(task, f"data.train_file={task}/sft_train.parquet"))
    assert "no column data_source, prompt, reward_model; it has messages, tools. `retool data rl` writes" in text


def test_a_wrong_value_is_an_error_without_model_and_data():
    shared = load_config(RlConfig, RL, ["memory.offload_idle=true", "reward.function=math:sqrt"])
    message = wrong(shared)
    assert any("memory.offload_idle" in text for text in message) and any("math:sqrt" in text for text in message)


def test_a_missing_model_is_an_error_only_on_the_machine_of_the_run():
    def severities(is_target: bool) -> list[str]:
        found = _findings("model", lambda: [missing("model", "no model")], replace(ELSEWHERE, is_target=is_target))
        return [each.severity for each in found]

    assert (severities(is_target=True), severities(is_target=False)) == (["error"], ["note"])
