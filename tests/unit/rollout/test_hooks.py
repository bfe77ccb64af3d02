"""Hooks of a user's tool that hang, raise or do not listen cost one call or one trajectory."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import pytest

from retool_mcore.rollout import hooks
from retool_mcore.rollout.metrics import Behavior, summarize
from retool_mcore.rollout.tool_output import CHARS_PER_TOKEN, without_middle
from retool_mcore.rollout.tools import Given, Tool, ToolResult
from tests.unit.rollout.scripted_engine import shown
from tests.unit.rollout.test_tools import ANSWER, Counter, ask, play


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "GRACE_S", 0.2)


class Ends(Counter):
    hook_timeout_s = 0.3

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    async def end(self, state: dict[str, int]) -> None:
        if self.how == "hangs":
            await asyncio.sleep(60)
        raise KeyError("mine")


class Deaf(Counter):
    """Swallows cancellation, as `except BaseException` around an await does."""

    timeout_s = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
        while not self.told.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.told.wait()
        return "late"


@pytest.mark.parametrize(("how", "fault"), [("hangs", "TimeoutError"), ("raises", "KeyError")])
async def test_an_end_that_fails_costs_no_finished_trajectory(tokenizer: Any, how: str, fault: str):
    started = time.monotonic()
    trajectory = await play(tokenizer, Ends(how), ask("count", n=1), ANSWER)
    assert trajectory.answer == "1379" and time.monotonic() - started < 5
    assert trajectory.faults == {f"count.end/{fault}": 1}
    metrics = summarize([Behavior.of(trajectory), Behavior.of(await play(tokenizer, Counter(), ANSWER))])
    assert metrics[f"behavior/tool_faults/count.end/{fault}"] == 0.5


async def test_a_start_that_hangs_is_a_call_that_took_too_long(tokenizer: Any):
    class Slow(Counter):
        hook_timeout_s = 0.2

        async def start(self, given: Given) -> dict[str, int]:
            await asyncio.sleep(60)
            return {}

    trajectory = await play(tokenizer, Slow(), ask("count", n=1), ANSWER)
    assert shown(trajectory)[0].startswith("[stopped at the time limit") and trajectory.answer == "1379"


async def test_a_tool_that_swallows_cancellation_is_left_alone(tokenizer: Any):
    deaf = Deaf()
    trajectory = await play(tokenizer, deaf, ask("count", n=1), ANSWER)
    deaf.told.set()
    assert trajectory.answer == "1379"
    assert shown(trajectory)[0].startswith("[stopped at the time limit, after 0.")


@pytest.mark.parametrize("answer", [ToolResult(text=cast("Any", None)), None, b"bytes"])
async def test_an_answer_that_is_no_text_is_one_failed_call(tokenizer: Any, answer: Any):
    class Wrong(Tool):
        name, description = "count", "x"
        parameters: ClassVar[dict[str, Any]] = {"type": "object"}

        async def call(self, arguments: Mapping[str, Any], state: Any) -> Any:
            return answer

    trajectory = await play(tokenizer, Wrong(), ask("count", n=1), ANSWER)
    assert shown(trajectory) == ["Error: count gave no text."] and trajectory.answer == "1379"
    assert trajectory.faults == {"count.call/TypeError": 1}


async def test_no_call_of_a_turn_runs_on_after_its_tools_end(tokenizer: Any):
    events: list[str] = []

    class Two(Counter):
        async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
            if arguments["n"] == 1:
                await asyncio.sleep(0.05)
                raise KeyError("mine")
            try:
                await asyncio.sleep(0.5)
                events.append("ran on")
            finally:
                events.append("over")
            return ""

        async def end(self, state: Any) -> None:
            events.append("end")

    turn = ask("count", n=2) + "\n" + ask("count", n=1) + "<|im_end|>"
    with pytest.raises(KeyError, match="mine"):
        await play(tokenizer, Two(), turn, ANSWER, calls="all")
    await asyncio.sleep(0.6)
    assert events == ["over", "end"]


async def test_a_huge_text_is_cut_before_it_is_cleaned(tokenizer: Any):
    class Huge(Counter):
        async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
            return "first " + "<tool_call> " * 5_500_000 + " last"

    started = time.process_time()
    trajectory = await play(tokenizer, Huge(), ask("count", n=1), ANSWER)
    spent_s = time.process_time() - started
    assert spent_s < 2.0, "4.4 s of the event loop when the 66 MB were cleaned first"
    [text] = shown(trajectory)
    assert text.startswith("first ") and text.endswith(" last") and "tokens cut here" in text


def test_what_is_taken_out_of_a_text_is_never_looked_at():
    kept = 64 * CHARS_PER_TOKEN * 10
    assert without_middle("x" * kept, 10) == "x" * kept
    assert without_middle("a" + "x" * kept + "b", 10) == "a" + "x" * (kept - 2) + "b"
