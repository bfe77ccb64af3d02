"""MCP servers for tests, and the tools that a run offers of them."""

import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from retool_mcore.config import RlConfig
from retool_mcore.config.load import build_config
from retool_mcore.rollout import mcp as adapter
from retool_mcore.rollout.calls import CallResult, Calls
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.rollout.tool_call import Call
from retool_mcore.rollout.tools import Tool, ToolContext
from tests.unit.rollout.budgets import limits as limits_for

ROOT = Path(__file__).parents[3]
SERVER = Path(__file__).with_name("mcp_server.py")
TINY = ROOT / "configs" / "rl_tiny_cpu.toml"
LIMITS = limits_for(max_response_tokens=2000, max_outage_s=60.0)


def over_stdio(**more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVER)], **more}


class served:
    """The server over HTTP on ``port``, answering, until the block ends."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(SERVER), "--http", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/mcp", trust_env=False, timeout=5)
                return self.process
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
    """The results of one turn's calls, which run concurrently."""
    protocol = open_protocol("hermes", tokenizer)
    protocol.offer(list(offered.values()))
    calls = Calls(protocol.tools, protocol.render_output, LIMITS, ToolContext(trajectory_id="t"))
    try:
        return await calls.run([Call(tool=name, arguments=arguments) for name, arguments in wanted])
    finally:
        await calls.close()
