"""Code problems with hidden unit tests: a tool with state, and a reward from its results.

    [rollout]
    tools = ["code_interpreter", "configs.examples.unit_tests:Submit"]
    [reward]
    function = "configs.examples.unit_tests:score"
    [sandbox]
    sessions = 64      # trajectories in flight: each has its own interpreter

A row's truth is JSON with the arguments and result of each test: {"function": "double", "cases":
[[[3], 6], [[5], 10]]}. The model does not see the tests, and its code does not see the results: a
submission runs in a fresh interpreter, which gets only the arguments and prints what the function
returns. `unit_tests_data.py` makes such rows; `rl_unit_tests_cpu.toml` trains on them.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retool_mcore.reward.response import Response
from retool_mcore.rollout.tools import Tool, ToolContext, ToolError, ToolResult
from retool_mcore.sandbox.base import Sandbox

TIMEOUT_S = 5.0
RUN_TESTS = """

import json as _json
_results = []
for _arguments in {arguments!r}:
    try: _results.append([{function}(*_arguments)])
    except Exception as _error: _results.append([])
print("\\n" + {mark!r} + _json.dumps(_results, default=repr))
"""


@dataclass
class State:
    """The state of one trajectory: its problem, and the number of passed tests per submission."""

    context: ToolContext
    function: str
    cases: list[tuple[list[Any], Any]]
    passed: list[int] = field(default_factory=list[int])


async def num_passed(sandbox: Sandbox, code: str, state: State) -> tuple[int, str]:
    """The number of tests that ``code`` passes, and its output.

    The results are compared here, so the code cannot tamper with the comparison.
    """
    mark = secrets.token_hex(16)
    tests = RUN_TESTS.format(arguments=[case[0] for case in state.cases], function=state.function, mark=mark)
    found = await sandbox.execute(code + tests, run_timeout_s=TIMEOUT_S)
    output, _, last = found.stdout.rpartition(mark)
    try:
        results = json.loads(last)
    except ValueError:
        return 0, found.text
    if not isinstance(results, list) or len(results) != len(state.cases):
        return 0, output
    return sum(result == [wanted] for result, (_, wanted) in zip(results, state.cases, strict=True)), output


class Submit(Tool):
    name = "submit"
    description = "Runs hidden tests on code and returns how many it passes."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Defines the function."}},
        "required": ["code"],
    }
    max_calls = 3

    async def start(self, context: ToolContext) -> State:
        tests = json.loads(context.truth)
        return State(context, tests["function"], tests["cases"])

    async def call(self, arguments: Mapping[str, Any], state: State) -> ToolResult:
        if state.context.sandbox is None:
            raise ToolError("there is no interpreter")
        passed, output = await num_passed(state.context.sandbox, arguments["code"], state)
        state.passed.append(passed)
        summary = f"{passed} of {len(state.cases)} tests passed"
        return ToolResult(text=f"{summary}\n{output.strip()}".strip(), ok=passed == len(state.cases))

    async def end(self, state: State) -> Mapping[str, float]:
        last = state.passed[-1] / len(state.cases) if state.passed else 0.0
        return {"passed": last, "submissions": len(state.passed)}


def score(response: Response) -> dict[str, float]:
    """The fraction of tests that the last submission passed. A response is right if all passed."""
    found = response.behavior["tool_numbers"].get(Submit.name, {})
    passed = found.get("passed", 0.0)
    return {"score": passed, "acc": float(passed == 1.0), "submissions": found.get("submissions", 0.0)}
