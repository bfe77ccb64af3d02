"""A model behind an API calls the sandbox and gets the result."""

from pathlib import Path

import pytest

from retool_mcore.rollout.engine import trajectory_seed
from tests.unit.evaluate.test_endpoint import StandIn, chat, evaluate, row, server  # noqa: F401  a fixture


def test_a_call_of_the_server_runs_in_the_sandbox_and_its_result_goes_back(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    server.script = [chat(None, "print(123 + 456)"), chat("It is \\boxed{579}.")]
    code, output, report = evaluate(server, tmp_path)
    assert code == 0, output
    assert report["accuracy"] == 1.0
    (path, first, key), (_, second, _) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer sk-test")
    assert (first["model"], first["top_p"], first["max_tokens"]) == ("org/served", 0.6, 16384)
    assert first["seed"] == trajectory_seed(0, row(tmp_path)["problem"], 0) != trajectory_seed(0, "another", 0)
    assert first["tools"][0]["function"]["name"] == "code_interpreter"
    assert second["max_tokens"] == 16374, "the server's own count is held against the budget"
    assistant, tool = second["messages"][-2:]
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "call_0_x"
    assert tool["content"].strip() == "579"
    assert row(tmp_path)["behavior"]["calls"] == 1
