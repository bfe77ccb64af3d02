"""configs/examples/chat_with_tool.py, on the page "Serving", against a stand-in server."""

from pathlib import Path

import pytest

from configs.examples import chat_with_tool
from retool_mcore.data.prompt_format import PromptFormat
from tests.unit.evaluate.test_endpoint import Here, StandIn, chat, server

__all__ = ["server"]  # the fixture


async def test_a_served_model_gets_its_code_run(server: StandIn):
    server.script = [chat(None, "print(123 ** 5)"), chat(None, ""), chat("It is \\boxed{28153056843}.")]
    said = await chat_with_tool.answer(server.url, "served", "What is 123 ** 5?", min_level="rlimits")
    assert said == "It is \\boxed{28153056843}."
    (_, first, _), (_, second, _), (_, third, _) = server.asked
    assert first["messages"][0]["content"].endswith("Put your final answer within \\boxed{}.")
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "call_0_x", "content": "28153056843"}
    assert third["messages"][-1]["content"].startswith("Error: arguments must be"), "a bad call is told, not raised"


async def test_it_ends_after_its_turns(server: StandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_with_tool, "open_sandbox", lambda where, min_level: Here())
    server.script = [chat(None, "print(1)")] * 2
    said = await chat_with_tool.answer(server.url, "served", "?", max_turns=2, min_level="rlimits")
    assert said == "No answer after 2 turns."


async def test_a_model_is_asked_as_its_run_asked_and_one_of_protocol_retool_is_refused(server: StandIn, tmp_path: Path):
    PromptFormat(system="You may run Python.", instruction="Box it.").write(tmp_path)
    server.script = [chat("It is \\boxed{4}.")]
    await chat_with_tool.answer(server.url, str(tmp_path), "2 + 2?", min_level="rlimits")
    assert server.asked[0][1]["messages"][:2] == [
        {"role": "system", "content": "You may run Python."},
        {"role": "user", "content": "2 + 2?\nBox it."},
    ]
    PromptFormat(instruction="", protocol="retool").write(tmp_path)
    with pytest.raises(SystemExit, match="uses protocol retool"):
        await chat_with_tool.answer(server.url, str(tmp_path), "2 + 2?", min_level="rlimits")
