"""Tools of MCP servers: real servers by the official SDK, over stdio and over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from retool_mcore.config import EvaluationConfig
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.run import Case, identity_of
from tests.unit.rollout.mcp_tools import config, over_stdio, tools


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
        ({"command": "sleep", "args": ["60"], "timeout_s": 0.5}, "no answer within timeout_s = 0.5"),
        (over_stdio(tools=["count", "nothing"]), 'rollout.mcp.s.tools has "nothing", but the server offers count,'),
        ({"url": "http://x", "headers_env": {"X-Key": "UNSET"}}, '.headers_env."X-Key" names UNSET, which is not in'),
        ({"url": "http://x", "token_env": "UNSET"}, "rollout.mcp.s.token_env names UNSET, which is not in"),
        (over_stdio(inherit=["UNSET"]), "rollout.mcp.s.inherit names UNSET, which is not in"),
    ],
)
def test_a_server_that_cannot_serve_is_one_error(server: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        tools({"s": server})
    assert message in str(caught.value)


def test_samples_of_other_servers_are_not_mixed():
    servers = (over_stdio(), over_stdio(tools=["count"]))
    runs = [EvaluationConfig.of(config({"a": server})) for server in servers]
    first, second = (identity_of(run, Case(name="m", model="m"), []) for run in runs)
    assert first != second
