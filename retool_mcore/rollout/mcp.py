"""Tools of servers of the Model Context Protocol, beside the interpreter: ``rollout.mcp``.

    [rollout.mcp.library]
    command = "python"
    args = ["configs/examples/mcp_server.py"]

By the official SDK (the extra ``mcp``). Each process that runs trajectories has one session with
each server, which all its trajectories share: what a server keeps of a session, they share, too.
Sessions live on a thread of their own. The SDK wants a session entered and left by one task, and
tools are listed where a protocol is made, which no event loop waits for.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import lru_cache
from typing import Any

from retool_mcore.config.mcp import McpServer
from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.rollout.tools import Tool, ToolError, ToolResult, check_tool

CLOSE_S = 5.0  # for a server to end by itself
AWAY = (-32000, -32001)  # the SDK's codes for a connection that closed and a request without answer
# The SDK's words for an HTTP status without an answer of the protocol: 404, and any other.
STAND_INS = ("Session terminated", "Server returned an error response")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


@lru_cache(maxsize=1)
def _thread() -> asyncio.AbstractEventLoop:
    """The loop on which the sessions of this process live."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


class Session:
    """One session with a server, opened when it is first needed and again after it was lost.

    ``name``: the server's in the run file. All methods are for any thread and any event loop.
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.where = f"rollout.mcp.{name}"
        self._server = server
        self._client: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        atexit.register(self.close)

    def listed(self) -> list[Any]:
        """The server's tools as the SDK has them. Raises ConfigError when it does not answer."""
        try:
            return self._sync(self._list(), self._server.timeout_s)
        except ConfigError:
            raise
        except TimeoutError as error:
            waited_s = self._server.timeout_s
            raise ConfigError(f"{self.where}: no answer within timeout_s = {waited_s:g}. {self._hint}") from error
        except Exception as error:  # whatever its transport raises
            raise ConfigError(f"{self.where} cannot be reached: {told(error)}. {self._hint}") from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """The SDK's result of one call.

        Raises ToolError for a request that the server refuses, SandboxUnavailable when it is away.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(tool, arguments), _thread()))

    def close(self) -> None:
        """End the session, and the server if it was started here."""
        with suppress(Exception):
            self._sync(self._lose(self._client), CLOSE_S)

    @property
    def _hint(self) -> str:
        if self._server.url:
            return f"Is a server at {self._server.url}, and does it speak streamable HTTP?"
        return f"Does `{' '.join([self._server.command, *self._server.args])}` speak MCP over stdio? Try it by hand."

    @staticmethod
    def _sync(work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, _thread())
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def _list(self) -> list[Any]:
        client, tools, cursor = await self._opened(), list[Any](), None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        client = None
        try:
            client = await self._opened()
            return await client.call_tool(tool, dict(arguments))
        except Exception as error:  # the protocol's, or whatever its transport raises
            if not is_outage(error):
                raise ToolError(told(error)) from error
            await self._lose(client)
            raise SandboxUnavailable(f"{self.where}: {told(error)}") from error

    async def _opened(self) -> Any:
        async with self._opening:
            if self._client is None:
                opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._holder = asyncio.ensure_future(self._hold(opened))
                try:
                    self._client = await opened
                except asyncio.CancelledError:
                    self._holder.cancel()
                    raise
            return self._client

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Enter the session and leave it in one task, as the SDK's cancel scopes ask for."""
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                opened.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(ConnectionError(told(error)))
            elif not isinstance(error, Exception):
                raise

    async def _transport(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command:
            handed_on = {name: os.environ[name] for name in server.inherit}
            return StdioServerParameters(command=server.command, args=server.args, env=handed_on | server.env)
        headers = {"Authorization": f"Bearer {os.environ[server.token_env]}"} if server.token_env else {}
        timeout = httpx2.Timeout(server.timeout_s, read=None)  # Calls limits the time of each call
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
        return streamable_http_client(server.url, http_client=http)

    async def _lose(self, client: Any) -> None:
        """Give up the session of ``client``, unless another call has and a new one is there."""
        if client is None or self._client is not client:
            return
        self._client, holder, self._holder = None, self._holder, None
        if holder is not None:
            holder.cancel()
            await asyncio.wait([holder])


def is_outage(error: Exception) -> bool:
    """Whether ``error`` says that the server is away, and not what it thinks of a request."""
    from mcp import MCPError

    if not isinstance(error, MCPError):
        return True
    return error.error.code in AWAY or error.error.message in STAND_INS


def told(error: BaseException) -> str:
    """The innermost words of an error that task groups have wrapped."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return told(inner[0]) if inner else str(error) or type(error).__name__


class McpTool(Tool):
    """One tool of a server; ``listed`` is the SDK's description of it."""

    def __init__(self, session: Session, listed: Any, server: McpServer) -> None:
        self.name = _UNFIT.sub("_", listed.name)
        self.description = listed.description or listed.title or listed.name
        self.parameters = listed.input_schema
        self.max_calls = server.max_calls or None
        self.timeout_s = server.timeout_s
        self._session, self._their_name = session, listed.name

    async def call(self, arguments: Mapping[str, Any], state: Any) -> ToolResult:
        result = await self._session.call(self._their_name, arguments)
        text = text_of(result)
        return ToolResult(text=f"Error: {text}" if result.is_error else text, ok=not result.is_error)


def text_of(result: Any) -> str:
    """What the model sees of a result: its texts; of what is no text, one line that says so."""
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
    """The tools that the servers of ``rollout.mcp`` offer, listed once in a process.

    Raises ConfigError for a server that does not answer, a tool that it does not have, and where
    the SDK is not installed.
    """
    return _tools(json.dumps({name: server.model_dump() for name, server in servers.items()}))


@lru_cache(maxsize=4)
def _tools(servers: str) -> tuple[Tool, ...]:
    found: list[Tool] = []
    for name, fields in json.loads(servers).items():
        server = McpServer(**fields)
        check_at_hand(name, server)
        session = Session(name, server)
        listed = {each.name: each for each in session.listed()}
        if missing := sorted({*server.tools} - {*listed}):
            raise ConfigError(
                f'rollout.mcp.{name}.tools has "{missing[0]}", and the server offers {", ".join(sorted(listed))}.'
            )
        wanted: Sequence[str] = server.tools or list(listed)
        found += [check_tool(f"rollout.mcp.{name}", McpTool(session, listed[each], server)) for each in wanted]
    return tuple(found)


def check_at_hand(name: str, server: McpServer) -> None:
    """Raise ConfigError where the SDK or a variable that the server needs is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(
            f"rollout.mcp.{name} needs the MCP SDK, which is not installed in {sys.executable}. Install it: pip "
            "install 'retool_mcore[mcp]', on every node."
        )
    for variable in filter(None, [server.token_env, *server.inherit]):
        if not os.environ.get(variable):
            key = "token_env" if server.token_env else "inherit"
            raise ConfigError(f"rollout.mcp.{name}.{key} names {variable}, which is not in the environment. Export it.")
