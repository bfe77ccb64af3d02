"""Tools of real MCP servers, which fail, forget sessions, die and come back."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from uuid import uuid4

import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.rollout.server import free_port
from retool_mcore.rollout.tools import Tool, ToolError
from tests.unit.rollout.mcp_tools import ROOT, ask, over_stdio, served, tools


@pytest.fixture(scope="module", params=["stdio", "http"])
def offered(request: pytest.FixtureRequest) -> Iterator[dict[str, Tool]]:
    if request.param == "stdio":
        yield tools({"local": over_stdio(timeout_s=20.0)})
        return
    with served(port := free_port()):
        yield tools({"remote": {"url": f"http://127.0.0.1:{port}/mcp"}})


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


CODES = [-32602, -32603, -32000, -32001]


async def test_a_servers_error_reaches_the_model_and_ends_no_other_call(offered: dict[str, Tool]):
    """Unrelated trajectories share the session, and SDKs choose different codes."""
    before = await offered["count"].call({"n": 0}, None)
    slow = asyncio.ensure_future(offered["waits"].call({"s": 3.0}, None))
    await asyncio.sleep(0.3)
    for code in CODES:
        with pytest.raises(ToolError, match=f"refused with {code}"):
            await offered["refuses"].call({"code": code}, None)
    assert not slow.done(), "the errors came while the other call ran"
    assert await offered["count"].call({"n": 0}, None) == before, "the same session, in the same process"
    assert (await slow).text == "waited"  # type: ignore[union-attr]


async def test_a_server_gets_the_variables_that_it_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RETOOL_TEST_KEY", "k1")
    monkeypatch.setenv("RETOOL_TEST_OTHER", "k2")
    found = tools({"local": over_stdio(inherit=["RETOOL_TEST_KEY"], env={"MODE": "quick"}, tools=["secret"])})
    asked = [("secret", {"name": name}) for name in ("RETOOL_TEST_KEY", "RETOOL_TEST_OTHER", "MODE")]
    assert [result.shown for result in await ask(tokenizer, found, *asked)] == ["k1", "not set", "quick"]


async def test_the_example_answers(tokenizer: Any):
    example = ROOT / "configs" / "examples" / "mcp_server.py"
    library = tools({"library": {"command": sys.executable, "args": [str(example)]}})
    [result] = await ask(tokenizer, library, ("search", {"word": "prime"}))
    assert result.ok and "prime" in result.shown.lower()


class Stateful(BaseHTTPRequestHandler):
    """A server of the handshake that most servers in use speak, with sessions that it may forget.

    The SDK's own server and client agree on a newer one, which has none.
    """

    known: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self.send_error(405)

    do_DELETE = do_GET

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, session = asked["method"], self.headers["Mcp-Session-Id"]
        if method == "initialize":
            session = uuid4().hex
            self.known.add(session)
        time.sleep(asked.get("params", {}).get("arguments", {}).get("s", 0.0))
        if session not in self.known:
            error = {"code": -32001, "message": "Session not found"}
            forgotten = (404, {"jsonrpc": "2.0", "id": None, "error": error})
            return self.answer(*forgotten if session else (400, None))
        if "id" not in asked:
            return self.answer(202, None)
        schema, page = {"type": "object", "properties": {}}, asked.get("params", {}).get("cursor")
        server = {"serverInfo": {"name": "stateful", "version": "1"}, "capabilities": {"tools": {}}}
        listed = [{"name": page or "where", "inputSchema": schema}]
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", **server},
            "tools/list": {"tools": listed, "nextCursor": None if page else "on_page_2"},
            "tools/call": {"content": [{"type": "text", "text": session}]},
        }
        return self.answer(200, {"jsonrpc": "2.0", "id": asked["id"], "result": results[method]}, session)

    def answer(self, status: int, body: dict[str, Any] | None, session: str = "") -> None:
        content = json.dumps(body).encode() if body else b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if session:
            self.send_header("Mcp-Session-Id", session)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def stateful() -> Iterator[tuple[type[Stateful], dict[str, Tool]]]:
    handler = type("Handler", (Stateful,), {"known": set[str]()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield handler, tools({"stateful": {"url": f"http://127.0.0.1:{http.server_port}/mcp"}})
        http.shutdown()


async def test_a_server_that_forgot_the_session_gets_a_new_one(tokenizer: Any):
    """As after its restart between two calls."""
    with stateful() as (server, remote):
        assert [*remote] == ["where", "on_page_2"]
        [first] = await ask(tokenizer, remote, ("where", {}))
        server.known.clear()
        # The second learns of it when the first has a new session already, which it must not drop.
        after = await ask(tokenizer, remote, ("where", {}), ("where", {"s": 1.5}), ("where", {"s": 3.0}))
        assert all(result.ok for result in after), [result.shown for result in after]
        assert len(server.known) == 1, "one new session, not one a call"
        assert {result.shown for result in after} == server.known
        assert first.shown not in server.known


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
