"""Tools from Model Context Protocol (MCP) servers, configured in ``rollout.mcp``.

    [rollout.mcp.library]
    command = "python"
    args = ["configs/examples/mcp_server.py"]

Uses the official SDK (the extra ``mcp``). Each process that runs trajectories opens one session per
server. All its trajectories share that session, including any state that the server keeps in it.

A background thread runs the event loop of all sessions. The SDK requires the same task to enter and
exit a session, and tools are listed from synchronous code that has no event loop.
"""

import asyncio
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from retool_mcore.config.mcp import McpServer
from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.rollout.tools import Tool, ToolError, ToolResult, check_tool

PROBE_S = 5.0  # time limit of the health check after an error
# The SDK's message for an HTTP error without an MCP response, such as a gateway's 503.
HTTP_ERROR = "Server returned an error response"
_INVALID_IN_NAME = re.compile(r"[^A-Za-z0-9_-]")


class McpTool(Tool):
    """One tool of an MCP server; ``listed`` is its entry in the SDK's tools/list result."""

    def __init__(self, session: "McpSession", listed: Any, server: McpServer) -> None:
        self.name = _INVALID_IN_NAME.sub("_", listed.name)
        self.description = listed.description or listed.title or listed.name
        self.parameters = listed.input_schema
        self.max_calls = server.max_calls or None
        self.timeout_s = None  # the session has separate limits for opening and for a call
        self._session, self._name_on_server = session, listed.name

    async def call(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        result = await self._session.call(self._name_on_server, arguments)
        parts = [_text_of(block) for block in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(parts)
        return ToolResult(text=f"Error: {text}" if result.is_error else text, ok=not result.is_error)


def _text_of(block: Any) -> str:
    """The text of a content block. Content that is not text becomes a one-line placeholder."""
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
    tools: list[Tool] = []
    for name, fields in json.loads(servers).items():
        server = McpServer(**fields)
        _check_requirements(name, server)
        session = McpSession(name, server)
        listed = {tool.name: tool for tool in session.list_tools()}
        if missing := sorted({*server.tools} - {*listed}):
            raise ConfigError(
                f'rollout.mcp.{name}.tools has "{missing[0]}", but the server offers {", ".join(sorted(listed))}.'
            )
        wanted: Sequence[str] = server.tools or list(listed)
        tools += [check_tool(f"rollout.mcp.{name}", McpTool(session, listed[tool], server)) for tool in wanted]
    return tuple(tools)


def _check_requirements(name: str, server: McpServer) -> None:
    """Raise ConfigError if the SDK or an environment variable of the server is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(
            f"rollout.mcp.{name} needs the MCP SDK, which is not installed in {sys.executable}. Install it: pip "
            "install 'retool_mcore[mcp]', on every node."
        )
    named = [("inherit", variable) for variable in server.inherit]
    named += [(f'headers_env."{header}"', variable) for header, variable in server.headers_env.items()]
    named += [("token_env", server.token_env)] if server.token_env else []
    for key, variable in named:
        if not os.environ.get(variable):
            raise ConfigError(f"rollout.mcp.{name}.{key} names {variable}, which is not in the environment. Export it.")


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs this process's sessions."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


@dataclass(frozen=True, eq=False)
class _Connection:
    """``client``: the SDK's session, once it is open. ``task`` keeps it open."""

    client: asyncio.Future[Any]
    task: asyncio.Task[None]


class McpSession:
    """A session that all trajectories of a process share. It reopens after a loss.

    ``name``: the server's name in the run file. Any thread and any event loop may call the methods.
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.where = f"rollout.mcp.{name}"
        self._server = server
        self._connection: _Connection | None = None

    def list_tools(self) -> list[Any]:
        """The server's tools as SDK objects. Raises ConfigError if the server does not answer."""
        server = self._server
        try:
            return asyncio.run_coroutine_threadsafe(self._list_tools(), _event_loop()).result()
        except Exception as error:  # a protocol error, or any error of its transport
            command = " ".join([server.command, *server.args])
            hint = (
                f"Is a server running at {server.url}, and does it speak streamable HTTP?"
                if server.url
                else f"Does `{command}` speak MCP over stdio? Try it by hand."
            )
            raise ConfigError(f"{self.where} cannot be reached: {_innermost_message(error)}. {hint}") from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call ``tool`` and return the SDK's result.

        Raises ToolError if the server rejects the call, TimeoutError after ``timeout_s``, and
        SandboxUnavailable if the server is down or has lost the session.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(tool, arguments), _event_loop()))

    async def _list_tools(self) -> list[Any]:
        client = await (await self._connect()).client
        tools, cursor = list[Any](), None
        try:
            async with asyncio.timeout(self._server.timeout_s):
                while True:
                    page = await client.list_tools(cursor=cursor, cache_mode="bypass")
                    tools += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        return tools
        except TimeoutError as error:
            raise self._no_answer("answer to tools/list") from error

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError

        try:
            connection = await self._connect()
            client = await connection.client
        except Exception as error:  # the transport may raise anything
            raise SandboxUnavailable(f"{self.where}: {_innermost_message(error)}") from error
        try:
            async with asyncio.timeout(self._server.timeout_s):
                return await client.call_tool(tool, dict(arguments))
        except Exception as error:
            # The error code cannot distinguish a rejected call from a lost session: SDKs use
            # different codes, and a tool may return any. So probe the server. A server that lost
            # the session, as after a restart, has not run the call, so a retry is safe. After a
            # timeout, the server may be hung, and the next call should not wait for it.
            answers = await _answers(client)
            if not answers:
                self._disconnect(connection)
            if isinstance(error, TimeoutError):
                raise
            if answers and isinstance(error, MCPError) and error.error.message != HTTP_ERROR:
                raise ToolError(_innermost_message(error)) from error
            raise SandboxUnavailable(f"{self.where}: {_innermost_message(error)}") from error

    async def _connect(self) -> _Connection:
        """The open connection, opened if necessary. Concurrent calls wait for the same opening."""
        if self._connection is None:
            client = asyncio.get_running_loop().create_future()
            self._connection = _Connection(client, asyncio.ensure_future(self._keep_open(client)))
        connection = self._connection
        try:
            async with asyncio.timeout(self._server.timeout_s):
                await asyncio.shield(connection.client)
        except Exception as error:
            self._disconnect(connection)
            if isinstance(error, TimeoutError):
                raise self._no_answer("answer") from error
            raise
        return connection

    def _disconnect(self, connection: _Connection) -> None:
        """Close a connection. Its pending calls fail."""
        if self._connection is connection:  # once: a second cancellation would interrupt the closing
            self._connection = None
            connection.task.cancel()

    async def _keep_open(self, client: asyncio.Future[Any]) -> None:
        """Enter and exit the session in one task, as the SDK's cancel scopes require."""
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                client.set_result(await stack.enter_async_context(Client(await self._transport(stack))))
                await asyncio.Event().wait()
        except BaseException as error:
            if not client.done():
                timed_out = isinstance(error, asyncio.CancelledError)  # `_disconnect` cancelled this task
                client.set_exception(
                    self._no_answer("answer") if timed_out else ConnectionError(_innermost_message(error))
                )
            elif not isinstance(error, Exception):
                raise

    async def _transport(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command:
            inherited = {name: os.environ[name] for name in server.inherit}
            return StdioServerParameters(command=server.command, args=server.args, env=inherited | server.env)
        headers = {name: os.environ[variable] for name, variable in server.headers_env.items()}
        if server.token_env:
            headers["Authorization"] = f"Bearer {os.environ[server.token_env]}"
        timeout = httpx2.Timeout(server.timeout_s, read=None)  # each call has its own limit
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
        return streamable_http_client(server.url, http_client=http)

    def _no_answer(self, what: str) -> ConnectionError:
        return ConnectionError(f"no {what} within timeout_s = {self._server.timeout_s:g}")


async def _answers(client: Any) -> bool:
    """Whether the server is up and knows this session. Lists tools: newer servers have no ping."""
    try:
        async with asyncio.timeout(PROBE_S):
            await client.list_tools(cache_mode="bypass")
    except Exception:  # noqa: BLE001  a protocol error, or any error of its transport
        return False
    return True


def _innermost_message(error: BaseException) -> str:
    """The message of the innermost exception in nested exception groups."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return _innermost_message(inner[0]) if inner else str(error) or type(error).__name__
