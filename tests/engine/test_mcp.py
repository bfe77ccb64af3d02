"""Tools of a real MCP server."""

import sys
from typing import Any

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.rollout.protocol import open_protocol, protocol_of
from retool_mcore.rollout.tools import Tool
from tests.unit.rollout.mcp_tools import ROOT, ask, config, over_stdio, tools
from tests.unit.rollout.test_mcp import url  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def local() -> dict[str, Tool]:
    return tools({"local": over_stdio(timeout_s=20.0)})


@pytest.fixture(scope="module", params=["stdio", "http"])
def offered(request: pytest.FixtureRequest, local: dict[str, Tool], url: str) -> dict[str, Tool]:
    return local if request.param == "stdio" else tools({"remote": {"url": url}})


def test_what_a_server_lists_stands_in_the_prompt(tokenizer: Any, offered: dict[str, Tool]):
    assert [*offered] == ["count", "fails", "refuses", "waits", "dies", "secret", "draw_circle"]
    protocol = open_protocol("hermes", tokenizer)
    protocol.offer(list(offered.values()))
    prompt = tokenizer.decode(protocol.prompt_ids([{"role": "user", "content": "How many?"}]))
    assert "draw_circle" in prompt and "Counts this server's calls of it" in prompt and "code_interpreter" in prompt
    assert offered["count"].parameters["properties"]["n"]["type"] == "integer"


async def test_results_errors_and_what_is_no_text(tokenizer: Any, offered: dict[str, Tool]):
    wanted = ("count", {"n": 0}), ("fails", {"n": 13}), ("draw_circle", {})
    counted, failed, drawn = await ask(tokenizer, offered, *wanted)
    assert counted.ok and counted.shown.startswith("0 in ")
    assert not failed.ok and "Error: " in failed.shown and "13 is not wanted" in failed.shown
    assert drawn.shown == "a circle\n[image of type image/png, not shown]"


async def test_a_server_gets_the_variables_that_it_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RETOOL_TEST_KEY", "k1")
    monkeypatch.setenv("RETOOL_TEST_OTHER", "k2")
    found = tools({"local": over_stdio(inherit=["RETOOL_TEST_KEY"], env={"MODE": "quick"}, tools=["secret"])})
    asked = [("secret", {"name": name}) for name in ("RETOOL_TEST_KEY", "RETOOL_TEST_OTHER", "MODE")]
    assert [result.shown for result in await ask(tokenizer, found, *asked)] == ["k1", "not set", "quick"]


def test_a_description_that_would_fill_the_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.mcp\.s: .* of the tool 'talks' have 5000\d+ characters"):
        tools({"s": over_stdio(env={"DESCRIPTION_CHARS": "5000000"})})
    found = tools({"s": over_stdio(env={"DESCRIPTION_CHARS": "20000"}, tools=["talks"])})
    assert len(found["talks"].description) == 20000


def test_two_tools_of_one_name_are_an_error(tokenizer: Any):
    both = config({"a": over_stdio(tools=["count"]), "b": over_stdio(tools=["count"])})
    with pytest.raises(ConfigError, match="two tools named count"):
        protocol_of(both.rollout, tokenizer)


def test_a_protocol_whose_calls_have_no_name_offers_none(tokenizer: Any):
    rollout = config({"a": over_stdio(tools=["count"])}).rollout.model_copy(update={"protocol": "retool"})
    with pytest.raises(ConfigError, match=r"rollout\.tools or rollout\.mcp offers 'count', and calls of .*\"retool\""):
        protocol_of(rollout, tokenizer)


async def test_the_example_answers(tokenizer: Any):
    example = ROOT / "configs" / "examples" / "mcp_server.py"
    library = tools({"library": {"command": sys.executable, "args": [str(example)]}})
    [result] = await ask(tokenizer, library, ("search", {"word": "prime"}))
    assert result.ok and "prime" in result.shown.lower()
