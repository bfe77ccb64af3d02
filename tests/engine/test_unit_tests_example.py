"""The example of code problems with hidden tests: its environment, its reward, its data."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from configs.examples.unit_tests import Submit, score
from configs.examples.unit_tests_data import SIZES, make, problems
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import read_rows
from retool_mcore.reward.own import OwnReward
from retool_mcore.reward.response import Response
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.rollout.tools import Given, open_tools
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import ScriptedEngine, call, roll_out, shown
from tests.unit.rollout.test_tools import ask

CONFIG = "configs/examples/rl_unit_tests_cpu.toml"
TRUTH = json.dumps({"function": "f", "cases": [[[3], 6417], [[5], 6419], [[7], [1, 2]]]})
RIGHT = "f = lambda x: [1, 2] if x == 7 else x + 6414"
DONE = "It is submitted.<|im_end|>"


@pytest.fixture(scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with open_sandbox("local", min_level="rlimits", workers=1, sessions=1) as opened:
        yield opened


async def play(tokenizer: Any, sandbox: Sandbox, *script: str) -> Trajectory:
    protocol = open_protocol("hermes", tokenizer)
    protocol.offer(list(open_tools(tuple(load_config(RlConfig, CONFIG).rollout.tools))))
    prompt = protocol.prompt_ids([{"role": "user", "content": "Write f(x)."}])
    limits = limits_for(max_response_tokens=4000, max_turns=8, sessions=True)
    engine = ScriptedEngine(tokenizer, script)
    return await roll_out(prompt, engine, sandbox, protocol, limits, given=Given(truth=TRUTH))


def rewarded(trajectory: Trajectory) -> dict[str, Any]:
    """As verl's worker judges it: from what is stored of the trajectory."""
    behavior = json.loads(json.dumps(Behavior.of(trajectory).to_json()))
    response = Response(data_source="", truth=TRUTH, answer=None, text="", behavior=behavior)
    return OwnReward("x:score", score)(response)


async def test_the_last_submission_counts_and_the_interpreter_keeps_its_state(tokenizer: Any, sandbox: Sandbox):
    develop = (call("k = 6414"), call("print(k + 3)"))
    trajectory = await play(tokenizer, sandbox, *develop, ask("submit", code="f = lambda x: x + 6414"), DONE)
    assert shown(trajectory)[1:] == ["6417", "2 of 3 tests passed"]
    assert trajectory.found == {"submit": {"passed": 2 / 3, "submissions": 1.0}}
    assert (rewarded(trajectory)["score"], rewarded(trajectory)["acc"]) == (2 / 3, 0.0)
    better = await play(tokenizer, sandbox, ask("submit", code="f = abs"), ask("submit", code=RIGHT), DONE)
    assert shown(better) == ["0 of 3 tests passed", "3 of 3 tests passed"]
    assert (rewarded(better)["score"], rewarded(better)["acc"], rewarded(better)["reward_submissions"]) == (1, 1, 2)
    worse = await play(tokenizer, sandbox, ask("submit", code=RIGHT), ask("submit", code="f = abs"), DONE)
    assert rewarded(worse)["score"] == 0.0
    assert rewarded(await play(tokenizer, sandbox, DONE))["score"] == 0.0


CHEATS = {
    "a result that equals everything": "class A:\n  def __eq__(s, o): return True\n  def __repr__(s): return '6417'\n"
    "f = lambda x: A()",
    "json that lies": "import json\njson.dumps = lambda *a, **k: '[[true], [true], [true]]'\nf = abs",
    "an early end": "import os\nprint('3 of 3 tests passed')\nos._exit(0)",
    "a result that is no list": "import json\njson.dumps = lambda *a, **k: '{}'\nf = abs",
    "the frames above": "import sys\nf = lambda x: [v for v in sys._getframe(1).f_globals.values() if v == 6417]",
    "nothing": "",
    "an error": "def f(x): raise SystemExit(0)",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
async def test_no_submission_passes_but_by_its_results(tokenizer: Any, sandbox: Sandbox, code: str):
    trajectory = await play(tokenizer, sandbox, ask("submit", code=code), DONE)
    assert rewarded(trajectory)["score"] == 0.0


async def test_the_model_is_told_neither_arguments_nor_results(tokenizer: Any, sandbox: Sandbox):
    trajectory = await play(tokenizer, sandbox, ask("submit", code="f = lambda x: x"), DONE)
    seen = tokenizer.decode([*trajectory.ledger.prompt_ids, *trajectory.ledger.response_ids])
    assert "0 of 3 tests passed" in seen and "6417" not in seen and "cases" not in seen


async def test_submissions_are_limited(tokenizer: Any, sandbox: Sandbox):
    trajectory = await play(tokenizer, sandbox, *[ask("submit", code="f = abs")] * 3, ask("submit", code=RIGHT), DONE)
    assert shown(trajectory)[-1] == "Error: submit may be called 3 times, and was."
    assert rewarded(trajectory)["score"] == 0.0


async def test_the_data_pass_with_the_right_code_alone(tokenizer: Any, sandbox: Sandbox, tmp_path: Path):
    for _, right, wrong, tests in itertools.islice(problems(0), 6):
        tool = Submit()
        state = await tool.start(Given(truth=tests, sandbox=sandbox))
        found = [(await tool.call({"code": code}, state)).text for code in (wrong, right)]
        assert found == ["0 of 3 tests passed", "3 of 3 tests passed"]
    make(tmp_path, {"sft_train": 8, "rl_train": 4})
    for _, row in read_rows(tmp_path / "sft_train.parquet", ["messages"]):
        _, _, submission, output, _ = row["messages"]
        code = submission["tool_calls"][0]["function"]["arguments"]["code"]
        assert output["content"] == f"{3 if ' + ' in code or ' - ' in code else 0} of 3 tests passed"
    questions = [each[0] for each in itertools.islice(problems(0), sum(SIZES.values()))]
    assert len(set(questions)) == sum(SIZES.values()), "preflight refuses problems that splits share"
    ((_, row), *_) = read_rows(tmp_path / "rl_train.parquet", ["reward_model"])
    assert json.loads(row["reward_model"]["ground_truth"])["function"] == "f"
