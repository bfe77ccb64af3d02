"""Tools of MCP servers: real servers by the official SDK, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
from mcp import MCPError

from retool_mcore.config import EvaluationConfig, RlConfig
from retool_mcore.config.load import build_config
from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.evaluate.run import Settings
from retool_mcore.rollout import mcp as adapter
from retool_mcore.rollout.calls import CallResult, Calls
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.protocol import open_protocol, protocol_of
from retool_mcore.rollout.tool_call import Call
from retool_mcore.rollout.tools import Tool

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("mcp_server.py")
TINY = ROOT / "configs" / "rl_tiny_cpu.toml"
LIMITS = Limits(max_response_tokens=2000, max_outage_s=5.0)


def over_stdio(**more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVER)], **more}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with served(port):
        yield f"http://127.0.0.1:{port}/mcp"


class served:
    """The server over HTTP on ``port``, answering, until the block ends."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> None:
        command = [sys.executable, str(SERVER), "--http", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/mcp", trust_env=False, timeout=5)
                return
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError("the server did not answer")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def config(servers: Mapping[str, Mapping[str, Any]]) -> RlConfig:
    tree = tomllib.loads(TINY.read_text(encoding="utf-8"))
    tree["rollout"]["mcp"] = servers
    return build_config(RlConfig, tree, "run.toml", ())


def tools(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, Tool]:
    return {tool.name: tool for tool in adapter.mcp_tools(config(servers).rollout.mcp)}


async def ask(tokenizer: Any, offered: Mapping[str, Tool], *wanted: tuple[str, dict[str, Any]]) -> list[CallResult]:
    """The calls of one turn of one trajectory, side by side."""
    protocol = open_protocol("hermes", tokenizer)
    protocol.offer(list(offered.values()))
    calls = Calls(None, protocol, LIMITS, "t")
    try:
        return await calls.run([Call(tool=name, arguments=arguments) for name, arguments in wanted])
    finally:
        await calls.close()


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


@pytest.mark.parametrize("code", [-32602, -32603, -32000 - 99])
async def test_what_a_server_answers_is_told_to_the_model(tokenizer: Any, local: dict[str, Tool], code: int):
    """Many servers answer with an internal error to what the model got wrong; the session stays."""
    [before] = await ask(tokenizer, local, ("count", {"n": 0}))
    [refused] = await ask(tokenizer, local, ("refuses", {"code": code}))
    assert not refused.ok and refused.shown == f"Error: refused with {code}"
    [after] = await ask(tokenizer, local, ("count", {"n": 0}))
    assert before.shown == after.shown, "the same process"


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (MCPError(-32000, "Connection closed"), True),
        (MCPError(-32001, "Timed out"), True),
        (MCPError(-32600, "Session terminated"), True),
        (MCPError(-32603, "Server returned an error response"), True),
        (ConnectionError("refused"), True),
        (MCPError(-32600, "no such word"), False),
        (MCPError(-32603, "division by zero"), False),
    ],
)
def test_an_outage_is_told_from_an_answer(error: Exception, away: bool):
    assert adapter.is_outage(error) is away


async def test_calls_that_fail_together_open_one_session(tokenizer: Any):
    """The call that fails second must not end what the first has opened."""
    shared = tools({"shared": over_stdio(tools=["dies", "waits", "count"])})
    waiting = [asyncio.ensure_future(shared["waits"].call({"s": 60.0}, None)) for _ in range(8)]
    await asyncio.sleep(0.5)
    failed = await asyncio.gather(shared["dies"].call({}, None), *waiting, return_exceptions=True)
    assert {type(each) for each in failed} == {SandboxUnavailable}
    found = await ask(tokenizer, shared, *[("count", {"n": 0})] * 8)
    assert len({result.shown for result in found}) == 1, "one process answered all"
    session = shared["count"]._session  # type: ignore[attr-defined]
    stale = object()
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session._lose(stale), adapter._thread()))
    assert (await ask(tokenizer, shared, ("count", {"n": 0})))[0].shown == found[0].shown


async def test_a_slow_call_is_stopped_and_others_go_on(tokenizer: Any):
    slow = tools({"local": over_stdio(timeout_s=20.0, tools=["waits", "count"], max_calls=2)})
    for tool in slow.values():
        tool.timeout_s = 0.5
    waited, counted = await ask(tokenizer, slow, ("waits", {"s": 30.0}), ("count", {"n": 1}))
    assert waited.status == "time_limit" and not waited.ok
    assert counted.ok
    again = await ask(tokenizer, slow, *[("count", {"n": 1})] * 3)
    assert [result.ok for result in again] == [True, True, False]
    assert "may be called 2 times" in again[2].shown


async def test_a_server_that_dies_is_started_again(tokenizer: Any):
    """Its call is an outage and is retried; another call finds a new process."""
    mortal = tools({"mortal": over_stdio(timeout_s=20.0)})
    [first] = await ask(tokenizer, mortal, ("count", {"n": 5}))
    with pytest.raises(SandboxUnavailable, match=r"rollout\.mcp\.mortal"):
        await mortal["dies"].call({}, None)
    [second] = await ask(tokenizer, mortal, ("count", {"n": 1}))
    assert first.shown.startswith("5 in ") and second.shown.startswith("1 in ")
    os.kill(int(second.shown.split()[-1]), signal.SIGKILL)  # while nobody calls
    [third] = await ask(tokenizer, mortal, ("count", {"n": 2}))
    assert third.ok and third.shown.startswith("2 in ")


async def test_a_remote_server_that_comes_back_is_waited_for(tokenizer: Any):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with served(port):
        remote = tools({"away": {"url": f"http://127.0.0.1:{port}/mcp"}})
        assert (await ask(tokenizer, remote, ("count", {"n": 1})))[0].shown.startswith("1 in ")
    call = asyncio.ensure_future(ask(tokenizer, remote, ("count", {"n": 1})))
    await asyncio.sleep(0.5)
    assert not call.done()
    with await asyncio.to_thread(enter, served(port)):
        [result] = await call
    assert result.ok and result.shown.startswith("1 in ")


class enter:
    """A context that has been entered elsewhere."""

    def __init__(self, context: Any) -> None:
        self.context = context
        context.__enter__()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)


async def test_a_server_gets_the_variables_that_it_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RETOOL_TEST_KEY", "k1")
    monkeypatch.setenv("RETOOL_TEST_OTHER", "k2")
    found = tools({"local": over_stdio(inherit=["RETOOL_TEST_KEY"], env={"MODE": "quick"}, tools=["secret"])})
    asked = [("secret", {"name": name}) for name in ("RETOOL_TEST_KEY", "RETOOL_TEST_OTHER", "MODE")]
    assert [result.shown for result in await ask(tokenizer, found, *asked)] == ["k1", "not set", "quick"]


def test_the_token_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RETOOL_TEST_KEY", "k1")
    seen: list[str | None] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match=r"rollout\.mcp\.s cannot be reached"):
            tools({"s": {"url": f"http://127.0.0.1:{http.server_port}/mcp", "token_env": "RETOOL_TEST_KEY"}})
        http.shutdown()
    assert {*seen} == {"Bearer k1"}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"url": "http://127.0.0.1:9/mcp"}, "rollout.mcp.s cannot be reached"),
        ({"command": "no-such-program"}, "rollout.mcp.s cannot be reached"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "rollout.mcp.s cannot be reached"),
        ({"command": "sleep", "args": ["60"], "timeout_s": 0.5}, "no answer within timeout_s = 0.5"),
        (over_stdio(tools=["count", "nothing"]), 'rollout.mcp.s.tools has "nothing", and the server offers count,'),
        ({"url": "http://127.0.0.1:9/mcp", "token_env": "NOT_SET_AT_ALL"}, "rollout.mcp.s.token_env names NOT_SET_AT"),
        ({}, "either a command, started here, or a url"),
        ({"url": "http://x/mcp", "args": ["a"]}, "args, env and inherit are a command's"),
        ({"command": "x", "token_env": "T"}, "token_env goes with url"),
        ({"url": "ftp://x"}, "does not begin with http:// or https://"),
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


def test_an_evaluation_is_told_apart_by_its_servers():
    def identity(*servers: dict[str, Any]) -> dict[str, Any]:
        run = config({"a": servers[0]} if servers else {})
        return Settings.of(EvaluationConfig.of(run), 1, True).identity()

    assert "mcp" not in identity()
    assert identity(over_stdio()) != identity(over_stdio(tools=["count"]))


async def test_the_example_answers(tokenizer: Any):
    example = ROOT / "configs" / "examples" / "mcp_server.py"
    library = tools({"library": {"command": sys.executable, "args": [str(example)]}})
    [result] = await ask(tokenizer, library, ("search", {"word": "prime"}))
    assert result.ok and "prime" in result.shown.lower()
