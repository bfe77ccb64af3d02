"""Tools of MCP servers: real servers by the official SDK, over stdio and over HTTP."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from retool_mcore.config import EvaluationConfig
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.run import Settings
from retool_mcore.rollout.protocol import open_protocol, protocol_of
from retool_mcore.rollout.server import free_port
from retool_mcore.rollout.tools import Tool
from tests.rollout.mcp_tools import ROOT, ask, config, over_stdio, served, tools


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(port := free_port()):
        yield f"http://127.0.0.1:{port}/mcp"


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


def test_secrets_of_the_environment_are_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RETOOL_TEST_KEY", "k1")
    monkeypatch.setenv("RETOOL_TEST_TENANT", "t1")
    seen: list[tuple[str | None, str | None]] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.headers["Authorization"], self.headers["X-Tenant"]))
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match=r"rollout\.mcp\.s cannot be reached"):
            named = {"token_env": "RETOOL_TEST_KEY", "headers_env": {"X-Tenant": "RETOOL_TEST_TENANT"}}
            tools({"s": {"url": f"http://127.0.0.1:{http.server_port}/mcp", **named}})
        http.shutdown()
    assert {*seen} == {("Bearer k1", "t1")}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"url": "http://127.0.0.1:9/mcp"}, "rollout.mcp.s cannot be reached"),
        ({"command": "no-such-program"}, "rollout.mcp.s cannot be reached"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "rollout.mcp.s cannot be reached"),
        ({"command": "sleep", "args": ["60"], "timeout_s": 0.5}, "no answer within timeout_s = 0.5"),
        (over_stdio(tools=["count", "nothing"]), 'rollout.mcp.s.tools has "nothing", and the server offers count,'),
        ({"url": "http://127.0.0.1:9/mcp", "token_env": "NOT_SET_AT_ALL"}, "rollout.mcp.s.token_env names NOT_SET_AT"),
        (
            {"url": "http://127.0.0.1:9/mcp", "headers_env": {"X-Key": "NOT_SET_AT_ALL"}},
            'rollout.mcp.s.headers_env."X-Key" names NOT_SET_AT_ALL, which is not in the environment',
        ),
        ({"command": "x", "inherit": ["NOT_SET_AT_ALL"]}, "rollout.mcp.s.inherit names NOT_SET_AT_ALL"),
        ({}, "needs either command or url"),
        ({"url": "http://x/mcp", "args": ["a"]}, "args, env and inherit need command"),
        ({"command": "x", "token_env": "T"}, "token_env and headers_env need url"),
        ({"command": "x", "headers_env": {"X-Key": "T"}}, "token_env and headers_env need url"),
        ({"url": "ftp://x"}, "must begin with http:// or https://"),
    ],
)
def test_a_server_that_cannot_serve_is_one_error(server: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        tools({"s": server})
    assert message in str(caught.value)


def test_without_the_sdk_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'retool_mcore\[mcp\]'"):
        tools({"unseen": over_stdio(max_calls=77)})


def test_two_tools_of_one_name_are_an_error(tokenizer: Any):
    both = config({"a": over_stdio(tools=["count"]), "b": over_stdio(tools=["count"])})
    with pytest.raises(ConfigError, match="two tools named count"):
        protocol_of(both.rollout, tokenizer)


def test_a_protocol_whose_calls_have_no_name_offers_none(tokenizer: Any):
    rollout = config({"a": over_stdio(tools=["count"])}).rollout.model_copy(update={"protocol": "retool"})
    with pytest.raises(ConfigError, match=r"rollout\.tools or rollout\.mcp offers 'count', and calls of .*\"retool\""):
        protocol_of(rollout, tokenizer)


def test_an_evaluation_is_told_apart_by_its_servers():
    def identity(*servers: dict[str, Any]) -> dict[str, Any]:
        run = config({"a": servers[0]} if servers else {})
        return Settings.of(EvaluationConfig.of(run), 1, True).identity()

    assert identity() != identity(over_stdio())
    assert identity(over_stdio()) != identity(over_stdio(tools=["count"]))


async def test_the_example_answers(tokenizer: Any):
    example = ROOT / "configs" / "examples" / "mcp_server.py"
    library = tools({"library": {"command": sys.executable, "args": [str(example)]}})
    [result] = await ask(tokenizer, library, ("search", {"word": "prime"}))
    assert result.ok and "prime" in result.shown.lower()
