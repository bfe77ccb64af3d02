"""The examples of configs/examples with a real sandbox: hidden tests, two tools, a served model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from configs.examples import chat_with_tool
from configs.examples.two_tools.make_data import make as make_two_tools
from configs.examples.unit_tests import score
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.prompt_format import PromptFormat
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.reward.response import Response
from retool_mcore.reward.user_function import UserReward
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import open_protocol, protocol_of
from retool_mcore.rollout.tools import ToolContext, open_tools
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox
from tests.unit.data.commands import succeed
from tests.unit.evaluate.test_endpoint import ScriptedApi, chat, server  # noqa: F401  a fixture
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import ScriptedEngine, call, roll_out, shown
from tests.unit.rollout.test_tools import ask

UNIT_TESTS = "configs/examples/rl_unit_tests_cpu.toml"
TRUTH = json.dumps({"function": "f", "cases": [[[3], 6417], [[5], 6419], [[7], [1, 2]]]})
RIGHT = "f = lambda x: [1, 2] if x == 7 else x + 6414"
DONE = "It is submitted.<|im_end|>"


@pytest.fixture(scope="module")
async def session_sandbox() -> AsyncIterator[Sandbox]:
    async with open_sandbox("local", min_level="rlimits", workers=1, sessions=1) as opened:
        yield opened


async def play(tokenizer: Any, session_sandbox: Sandbox, *script: str) -> Trajectory:
    protocol = open_protocol("hermes", tokenizer)
    protocol.offer(list(open_tools(tuple(load_config(RlConfig, UNIT_TESTS).rollout.tools))))
    prompt = protocol.prompt_ids([{"role": "user", "content": "Write f(x)."}])
    limits = limits_for(max_response_tokens=4000, max_turns=8, sessions=True)
    engine = ScriptedEngine(tokenizer, script)
    return await roll_out(prompt, engine, session_sandbox, protocol, limits, tool_context=ToolContext(truth=TRUTH))


def rewarded(trajectory: Trajectory) -> dict[str, Any]:
    """As verl's worker judges it: from what is stored of the trajectory."""
    behavior = json.loads(json.dumps(Behavior.of(trajectory).to_json()))
    response = Response(data_source="", truth=TRUTH, answer=None, text="", behavior=behavior)
    return UserReward("x:score", score)(response)


async def test_the_last_submission_counts_and_the_interpreter_keeps_its_state(tokenizer: Any, session_sandbox: Sandbox):
    develop = (call("k = 6414"), call("print(k + 3)"))
    trajectory = await play(tokenizer, session_sandbox, *develop, ask("submit", code="f = lambda x: x + 6414"), DONE)
    assert shown(trajectory)[1:] == ["6417", "2 of 3 tests passed"]
    assert trajectory.tool_numbers == {"submit": {"passed": 2 / 3, "submissions": 1.0}}
    assert (rewarded(trajectory)["score"], rewarded(trajectory)["acc"]) == (2 / 3, 0.0)
    better = await play(tokenizer, session_sandbox, ask("submit", code="f = abs"), ask("submit", code=RIGHT), DONE)
    assert shown(better) == ["0 of 3 tests passed", "3 of 3 tests passed"]
    assert (rewarded(better)["score"], rewarded(better)["acc"], rewarded(better)["reward_submissions"]) == (1, 1, 2)
    worse = await play(tokenizer, session_sandbox, ask("submit", code=RIGHT), ask("submit", code="f = abs"), DONE)
    assert rewarded(worse)["score"] == 0.0
    assert rewarded(await play(tokenizer, session_sandbox, DONE))["score"] == 0.0


CHEATS = {
    "a result that equals everything": "class A:\n  def __eq__(s, o): return True\n  def __repr__(s): return '6417'\n"
    "f = lambda x: A()",
    "json that lies": "import json\njson.dumps = lambda *a, **k: '[[true], [true], [true]]'\nf = abs",
    "an early end": "import os\nprint('3 of 3 tests passed')\nos._exit(0)",
    "the frames above": "import sys\nf = lambda x: [v for v in sys._getframe(1).f_globals.values() if v == 6417]",
    "an error": "def f(x): raise SystemExit(0)",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
async def test_no_submission_passes_but_by_its_results(tokenizer: Any, session_sandbox: Sandbox, code: str):
    trajectory = await play(tokenizer, session_sandbox, ask("submit", code=code), DONE)
    assert rewarded(trajectory)["score"] == 0.0


def test_the_example_of_two_tools_makes_what_both_trainings_read(tmp_path):
    make_two_tools(tmp_path, {"conversations": 40, "problems": 20})
    output = succeed("sft", tmp_path / "conversations.jsonl", "--out", tmp_path / "sft.parquet", "--execute")
    assert "40 after execution (0 rejected)" in output, "the interpreter's calls print what the data shows"
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    examples = load_sft([str(tmp_path / "sft.parquet")], tokenizer, 512).examples
    assert len(examples) == 40
    for example in examples:
        trained = tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])
        assert trained.count('"name": "lookup"') == 2 and trained.count('"name": "code_interpreter"') == 1
    protocol = protocol_of(load_config(RlConfig, "configs/examples/two_tools/rl_cpu.toml").rollout, tokenizer)
    prompt = tokenizer.decode(protocol.prompt_ids([{"role": "user", "content": "?"}]))
    assert "lookup" in prompt and "code_interpreter" in prompt


async def test_a_served_model_is_asked_as_its_run_asked_and_gets_its_code_run(server: ScriptedApi, tmp_path: Path):
    PromptFormat(system="You may run Python.", instruction="Box it.").write(tmp_path)
    server.script = [chat(None, "print(123 ** 5)"), chat(None, ""), chat("It is \\boxed{28153056843}.")]
    text = await chat_with_tool.answer(server.url, str(tmp_path), "What is 123 ** 5?", min_level="rlimits")
    assert text == "It is \\boxed{28153056843}."
    (_, first, _), (_, second, _), (_, third, _) = server.requests
    assert [message["content"] for message in first["messages"]] == [
        "You may run Python.",
        "What is 123 ** 5?\nBox it.",
    ]
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "call_0_x", "content": "28153056843"}
    assert third["messages"][-1]["content"].startswith("Error: arguments must be")
    PromptFormat(instruction="", protocol="retool").write(tmp_path)
    with pytest.raises(SystemExit, match="uses protocol retool"):
        await chat_with_tool.answer(server.url, str(tmp_path), "2 + 2?", min_level="rlimits")
