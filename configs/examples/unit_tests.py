"""Code problems with hidden unit tests: an environment with a state, and the reward it gives.

    [rollout]
    tools = ["code_interpreter", "configs.examples.unit_tests:Submit"]
    [reward]
    function = "configs.examples.unit_tests:score"
    [sandbox]
    sessions = 64      # trajectories at work: each develops its code in an interpreter of its own

A row's truth is JSON: {"function": "double", "cases": [[[3], 6], [[5], 10]]}, arguments and result
of each test. The model never sees them, and nor does its code see a result: a submission runs in a
fresh interpreter, which is told the arguments and tells what the function returned.
`unit_tests_data.py` makes such rows; `rl_unit_tests_cpu.toml` trains on them.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retool_mcore.reward.response import Response
from retool_mcore.rollout.tools import Given, Tool, ToolError, ToolResult
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
    """One trajectory: its problem, and how many tests its last submission passed."""

    given: Given
    function: str
    cases: list[tuple[list[Any], Any]]
    passed: list[int] = field(default_factory=list[int])


async def num_passed(sandbox: Sandbox, code: str, state: State) -> tuple[int, str]:
    """Tests that ``code`` passes, and what it said. The comparison is ours, out of its reach."""
    mark = secrets.token_hex(16)
    tests = RUN_TESTS.format(arguments=[case[0] for case in state.cases], function=state.function, mark=mark)
    found = await sandbox.execute(code + tests, run_timeout_s=TIMEOUT_S)
    said, _, last = found.stdout.rpartition(mark)
    try:
        results = json.loads(last)
    except ValueError:
        return 0, found.text
    if not isinstance(results, list) or len(results) != len(state.cases):
        return 0, said
    return sum(result == [wanted] for result, (_, wanted) in zip(results, state.cases, strict=True)), said


class Submit(Tool):
    name = "submit"
    description = "Runs hidden tests on code and tells how many it passes."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Defines the function."}},
        "required": ["code"],
    }
    max_calls = 3

    async def start(self, given: Given) -> State:
        tests = json.loads(given.truth)
        return State(given, tests["function"], tests["cases"])

    async def call(self, arguments: Mapping[str, Any], state: State) -> ToolResult:
        if state.given.sandbox is None:
            raise ToolError("there is no interpreter")
        passed, said = await num_passed(state.given.sandbox, arguments["code"], state)
        state.passed.append(passed)
        told = f"{passed} of {len(state.cases)} tests passed"
        return ToolResult(text=f"{told}\n{said.strip()}".strip(), ok=passed == len(state.cases))

    async def end(self, state: State) -> Mapping[str, float]:
        last = state.passed[-1] / len(state.cases) if state.passed else 0.0
        return {"passed": last, "submissions": len(state.passed)}


def score(response: Response) -> dict[str, float]:
    """The share of tests that the last submission passed; right is who passed all."""
    found = response.behavior["found"].get(Submit.name, {})
    passed = found.get("passed", 0.0)
    return {"score": passed, "acc": float(passed == 1.0), "submissions": found.get("submissions", 0.0)}
