"""Tools from Model Context Protocol (MCP) servers, configured in ``rollout.mcp``.

    [rollout.mcp.library]
    command = "python"
    args = ["configs/examples/mcp_server.py"]

Uses the official SDK (the extra ``mcp``). Each process that runs trajectories opens one session per
server. All its trajectories share that session, including any state that the server keeps in it.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from retool_mcore.config.mcp import McpServer
from retool_mcore.errors import ConfigError
from retool_mcore.rollout.mcp_session import McpSession
from retool_mcore.rollout.tools import Tool, ToolResult, check_tool

_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


class McpTool(Tool):
    """One tool of an MCP server; ``listed`` is its entry in the SDK's tools/list result."""

    def __init__(self, session: McpSession, listed: Any, server: McpServer) -> None:
        self.name = _UNFIT.sub("_", listed.name)
        self.description = listed.description or listed.title or listed.name
        self.parameters = listed.input_schema
        self.max_calls = server.max_calls or None
        self.timeout_s = None  # the session has separate limits for opening and for a call
        self._session, self._their_name = session, listed.name

    async def call(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        result = await self._session.call(self._their_name, arguments)
        text = text_of(result)
        return ToolResult(text=f"Error: {text}" if result.is_error else text, ok=not result.is_error)


def text_of(result: Any) -> str:
    """The text of a result. Content that is not text becomes a one-line placeholder."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _part(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return block.resource.text
    if block.type in ("resource", "resource_link"):
        return f"[resource {getattr(block, 'uri', None) or block.resource.uri}, not shown]"
    return f"[{block.type} of type {block.mime_type}, not shown]"


def mcp_tools(servers: Mapping[str, McpServer]) -> tuple[Tool, ...]:
    """The tools of the servers in ``rollout.mcp``. A process lists them once and caches the result.

    Raises ConfigError if a server does not answer, lacks a configured tool, or if the SDK is not
    installed.
    """
    return _tools(json.dumps({name: server.model_dump() for name, server in servers.items()}))


@lru_cache(maxsize=4)
def _tools(servers: str) -> tuple[Tool, ...]:
    found: list[Tool] = []
    for name, fields in json.loads(servers).items():
        server = McpServer(**fields)
        check_at_hand(name, server)
        session = McpSession(name, server)
        listed = {each.name: each for each in session.listed()}
        if missing := sorted({*server.tools} - {*listed}):
            raise ConfigError(
                f'rollout.mcp.{name}.tools has "{missing[0]}", and the server offers {", ".join(sorted(listed))}.'
            )
        wanted: Sequence[str] = server.tools or list(listed)
        found += [check_tool(f"rollout.mcp.{name}", McpTool(session, listed[each], server)) for each in wanted]
    return tuple(found)


def check_at_hand(name: str, server: McpServer) -> None:
    """Raise ConfigError if the SDK or an environment variable of the server is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(
            f"rollout.mcp.{name} needs the MCP SDK, which is not installed in {sys.executable}. Install it: pip "
            "install 'retool_mcore[mcp]', on every node."
        )
    named = [("inherit", each) for each in server.inherit]
    named += [(f'headers_env."{header}"', each) for header, each in server.headers_env.items()]
    named += [("token_env", server.token_env)] if server.token_env else []
    for key, variable in named:
        if not os.environ.get(variable):
            raise ConfigError(f"rollout.mcp.{name}.{key} names {variable}, which is not in the environment. Export it.")
