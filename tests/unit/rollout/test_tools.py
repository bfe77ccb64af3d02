"""User-defined tools: offered, called, counted and ended in each trajectory.

A fault of a hook costs one call or one trajectory.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from retool_mcore.config import SandboxSettings, ToolLoop, load_evaluation
from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior, summarize
from retool_mcore.rollout.protocol import TextOnly, ToolProtocol, open_protocol, protocol_of
from retool_mcore.rollout.records import record
from retool_mcore.rollout.tool_call import Call, parse_qwen3_coder
from retool_mcore.rollout.tools import Tool, ToolContext, ToolError, ToolResult, check_tool, open_tools
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import ScriptedEngine, call, roll_out, shown

SEARCH = "configs.examples.tools:Search"
ANSWER = "It is \\boxed{1379}.<|im_end|>"
LIMITS = limits_for(max_response_tokens=2000, max_outage_s=0.5)
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SANDBOX: Any = object()  # no call of these tests reaches it


class Counter(Tool):
    """Adds up its arguments, for each trajectory."""

    name = "count"
    description = "Adds n to a total and returns it."
    parameters: Mapping[str, Any] = NUMBER

    def __init__(self) -> None:
        self.started: list[ToolContext] = []
        self.ended: list[dict[str, int]] = []
        self.fails: list[Exception] = []

    async def start(self, context: ToolContext) -> dict[str, int]:
        self.started.append(context)
        await asyncio.sleep(0.01)
        return {"total": 0}

    async def call(self, arguments: Mapping[str, Any], state: dict[str, int]) -> str | ToolResult:
        if self.fails:
            raise self.fails.pop()
        if arguments["n"] == 13:
            raise ToolError("13 is not counted")
        state["total"] += arguments["n"]
        return ToolResult(text=f"total {state['total']}", ok=arguments["n"] >= 0)

    async def end(self, state: dict[str, int]) -> Mapping[str, float] | None:
        self.ended.append(state)
        return state


def ask(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(tokenizer: Any, tool: Tool, *script: str, **options: Any) -> Trajectory:
    protocol = open_protocol("hermes", tokenizer)
    protocol.offer([tool])
    prompt = protocol.prompt_ids([{"role": "user", "content": "What is 412 + 967?"}])
    return await roll_out(prompt, ScriptedEngine(tokenizer, script), SANDBOX, protocol, LIMITS, **options)


async def test_each_trajectory_has_its_own_state_from_its_first_call_to_its_end(tokenizer):
    tool = Counter()
    script = (ask("count", n=2), ask("count", n=3), ANSWER)
    rows = {name: ToolContext(truth=name, data_source="d", extra_info={"row": name}) for name in "ab"}
    playing = (play(tokenizer, tool, *script, trajectory_id=f"t{n}", tool_context=row) for n, row in rows.items())
    first, second = await asyncio.gather(*playing)
    assert shown(first) == shown(second) == ["total 2", "total 5"]
    wanted = [replace(row, trajectory_id=f"t{name}", sandbox=SANDBOX) for name, row in rows.items()]
    assert sorted(tool.started, key=lambda context: context.truth) == wanted
    assert tool.ended == [{"total": 5}, {"total": 5}] and second.tool_numbers == {"count": {"total": 5.0}}
    silent = await play(tokenizer, tool, ANSWER)
    assert silent.answer == "1379" and len(tool.started) == 2, "nothing starts without a call"


async def test_the_model_reads_its_mistakes_which_count_as_failed(tokenizer):
    tool = Counter()
    tool.max_calls = 2
    script = (ask("count", n=13), ask("count", n=-1), ask("count", n="2"), ask("count", n=1), ANSWER)
    trajectory = await play(tokenizer, tool, *script)
    refused = "Error: count can be called only 2 times."
    assert shown(trajectory) == ["Error: 13 is not counted", "total -1", refused]
    assert [result.ok for turn in trajectory.turns for result in turn.results] == [False] * 3
    assert tool.ended == [{"total": -1}], "a call beyond the tool's own budget is not run"
    written = tokenizer.decode(trajectory.ledger.response_ids)
    assert "arguments['n'] of count: '2' is not of type 'integer'" in written
    parsed = trajectory.turns[2].parsed
    assert parsed is not None and parsed.problem == "arguments" and trajectory.answer == "1379"


async def test_a_lasting_outage_and_a_bug_of_the_tool_drop_the_trajectory(tokenizer):
    tool = Counter()
    tool.fails = [SandboxUnavailable("away")]
    assert shown(await play(tokenizer, tool, ask("count", n=1), ANSWER)) == ["total 1"]
    tool.fails = [SandboxUnavailable("gone")] * 50
    lost = await play(tokenizer, tool, ask("count", n=1), ANSWER)
    assert lost.stop_reason == StopReason.DROPPED and "gone" in str(lost.drop_error)
    tool.fails = [KeyError("mine")]
    failed = await play(tokenizer, tool, ask("count", n=1), ANSWER)
    assert failed.dropped and failed.drop_error == "ToolFailed: count.call raised KeyError: 'mine'"
    assert len(tool.ended) == 3, "its state is given up"


async def test_a_failing_end_hook_keeps_the_trajectory(tokenizer: Any):
    class Ends(Counter):
        async def end(self, state: dict[str, int]) -> Mapping[str, float]:
            return {"total": math.nan}

    trajectory = await play(tokenizer, Ends(), ask("count", n=1), ANSWER)
    assert trajectory.answer == "1379" and not trajectory.tool_numbers
    assert trajectory.faults == {"count.end/ValueError": 1}
    metrics = summarize([Behavior.of(trajectory), Behavior.of(await play(tokenizer, Counter(), ANSWER))])
    assert metrics["behavior/tool_faults/count.end/ValueError"] == 0.5


async def test_a_call_that_hangs_is_stopped_at_its_time_limit(tokenizer: Any):
    class Slow(Counter):
        timeout_s = 0.2

        async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
            await asyncio.sleep(60)
            return "late"

    trajectory = await play(tokenizer, Slow(), ask("count", n=1), ANSWER)
    assert trajectory.answer == "1379"
    assert shown(trajectory)[0].startswith("[stopped at the time limit, after 0.")
    assert trajectory.turns[0].results[0].status == "time_limit"


async def test_records_and_metrics_name_the_tool(tokenizer):
    trajectory = await play(tokenizer, Counter(), ask("count", n=1), ANSWER)
    [result] = record(trajectory)["turns"][0]["results"]
    assert (result["tool"], result["code"]) == ("count", '{"n": 1}')
    behavior = Behavior.of(trajectory)
    assert (behavior.calls, behavior.code_lines, behavior.tool_calls) == (1, 0, {"count": 1})
    assert summarize([behavior, replace(behavior, tool_calls={})])["behavior/calls/count"] == 0.5
    assert Behavior(**json.loads(json.dumps(behavior.to_json()))) == behavior


def offering(tokenizer: Any, *tools: str) -> tuple[ToolProtocol, str]:
    """The protocol of a run with these tools, and its prompt."""
    config = load_evaluation("configs/rl_tiny_cpu.toml", [f"rollout.tools={json.dumps(tools)}"])
    protocol = protocol_of(config.rollout, tokenizer)
    return protocol, tokenizer.decode(protocol.prompt_ids([{"role": "user", "content": "?"}]))


def test_the_prompt_has_the_schema_and_the_reader_takes_the_name(tokenizer):
    protocol, prompt = offering(tokenizer, "code_interpreter", SEARCH)
    assert "search" in prompt and "code_interpreter" in prompt
    assert protocol.read((), ask("search", query="roots")).calls == (Call("search", {"query": "roots"}),)
    assert protocol.read((), call("print(1)")).calls == (Call("code_interpreter", {"code": "print(1)"}),)
    other = protocol.read((), ask("calculator", x=1))
    assert other.error == "there is no tool named 'calculator'. The tools are 'code_interpreter', 'search'"
    xml = "<tool_call>\n<function={}>\n<parameter={}>\n12\n</parameter>\n</function>\n</tool_call>"
    for name, parameter, value in (("search", "query", "12"), ("count", "n", 12)):
        typed = parse_qwen3_coder(xml.format(name, parameter), [*protocol.tools, Counter()])
        assert typed.calls == (Call(name, {parameter: value}),), "by the type in the schema"


def test_without_the_interpreter_only_own_tools_are_offered_and_named_in_errors(tokenizer):
    protocol, prompt = offering(tokenizer, SEARCH)
    assert "search" in prompt and "code_interpreter" not in prompt
    assert protocol.read((), ask("search", query="roots")).calls == (Call("search", {"query": "roots"}),)
    errors = [protocol.read((), text).error for text in (call("print(1)"), "</tool_call>")]
    assert errors == [
        "there is no tool named 'code_interpreter'. The tools are 'search'",
        "the call has no opening tag. The tools are 'search'",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("retool_mcore.rollout.tools:Tool", "cannot be created without arguments"),
        ("tests.unit.rollout.test_tools:NUMBER", "is neither a retool_mcore.rollout.tools.Tool nor"),
    ],
)
def test_a_wrong_tool_is_refused_at_the_start(name: str, message: str):
    with pytest.raises(ConfigError, match=rf"rollout\.tools.* {message}"):
        open_tools((name,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parameters": {"type": "objekt"}}, "parameters of count are not a usable JSON schema"),
        ({"parameters": {"type": "string"}}, "parameters of count must describe an object"),
        ({"name": "a b"}, "a tool cannot be named 'a b'"),
        ({"name": "code_interpreter"}, "a tool cannot be named 'code_interpreter'"),
    ],
)
def test_a_tool_with_a_wrong_field_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"here: {message}"):
        check_tool("here", type("Wrong", (Counter,), fields)())


def test_a_run_without_tools_is_text_only_unless_it_has_mcp_servers(tokenizer):
    def loop(*settings: str) -> ToolLoop:
        return load_evaluation("configs/rl_tiny_cpu.toml", ["rollout.max_turns=5", *settings]).rollout

    server = 'rollout.mcp={ mine = { url = "http://here" } }'
    for settings, tool in (((), True), (("rollout.tools=[]",), False), (("rollout.tools=[]", server), True)):
        found = loop(*settings)
        assert (found.tool, Limits.of(found, SandboxSettings()).max_turns) == (tool, 5 if tool else 1)
    text, own = loop("rollout.tools=[]"), loop(f'rollout.tools=["{SEARCH}"]')
    assert type(protocol_of(text, tokenizer)) is type(protocol_of(own.with_tools(False), tokenizer)) is TextOnly
    assert (text.with_tools(True).tools, own.with_tools(True).tools) == (["code_interpreter"], [SEARCH])
