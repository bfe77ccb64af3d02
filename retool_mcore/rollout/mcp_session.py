"""A session with a Model Context Protocol server that reconnects after it is lost.

A background thread runs the event loop of all sessions. The SDK requires the same task to enter and
exit a session, and tools are listed from synchronous code that has no event loop.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar

from retool_mcore.config.mcp import McpServer
from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.rollout.tools import ToolError

FoundT = TypeVar("FoundT")

CLOSE_S = 5.0  # time for a server to exit
PROBE_S = 5.0  # time limit of the health check after an error
# The SDK's message for an HTTP error without an MCP response, such as a gateway's 503.
HTTP_ERROR = "Server returned an error response"


@lru_cache(maxsize=1)
def _thread() -> asyncio.AbstractEventLoop:
    """The event loop that runs this process's sessions."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


class _Connection:
    """An open SDK session, and the task that keeps it open."""

    def __init__(self, client: Any, holder: asyncio.Task[None]) -> None:
        self.client, self.holder = client, holder

    async def list(self) -> list[Any]:
        tools, cursor = list[Any](), None
        while True:
            page = await self.client.list_tools(cursor=cursor, cache_mode="bypass")
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def answers(self) -> bool:
        """Whether the server is up and knows this session. Newer servers have no ping."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self.client.list_tools(cache_mode="bypass")
        except Exception:  # noqa: BLE001  a protocol error, or any error of its transport
            return False
        return True


class McpSession:
    """A session that all trajectories of a process share. It reopens after a loss.

    ``name``: the server's name in the run file. Any thread and any event loop may call the methods.
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.where = f"rollout.mcp.{name}"
        self._server = server
        self._opening: asyncio.Task[_Connection] | None = None
        atexit.register(self.close)

    def listed(self) -> list[Any]:
        """The server's tools as SDK objects. Raises ConfigError if the server does not answer."""
        try:
            return _sync(self._list())
        except Exception as error:  # a protocol error, or any error of its transport
            raise ConfigError(f"{self.where} cannot be reached: {told(error)}. {self._hint}") from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call ``tool`` and return the SDK's result.

        Raises ToolError if the server rejects the call, TimeoutError after ``timeout_s``, and
        SandboxUnavailable if the server is down or has lost the session.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(tool, arguments), _thread()))

    def close(self) -> None:
        """Close the session, and stop the server if this session started it."""
        with suppress(Exception):
            _sync(self._leave(), CLOSE_S)

    @property
    def _hint(self) -> str:
        if self._server.url:
            return f"Is a server at {self._server.url}, and does it speak streamable HTTP?"
        return f"Does `{' '.join([self._server.command, *self._server.args])}` speak MCP over stdio? Try it by hand."

    async def _list(self) -> list[Any]:
        connection = await self._opened()
        async with self._limit("answer to tools/list"):
            return await connection.list()

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError

        try:
            connection = await self._opened()
        except Exception as error:  # the transport may raise anything
            raise SandboxUnavailable(f"{self.where}: {told(error)}") from error
        try:
            async with asyncio.timeout(self._server.timeout_s):
                return await connection.client.call_tool(tool, dict(arguments))
        except TimeoutError:
            await self._kept(connection)  # drops a hung connection, so that the next call does not wait for it
            raise
        except Exception as error:
            # The error code cannot distinguish a rejected call from a lost session: SDKs use
            # different codes, and a tool may return any. So probe the server. One that lost the
            # session, as after a restart, has not run the call, and a retry is safe.
            there = await self._kept(connection)
            if there and isinstance(error, MCPError) and error.error.message != HTTP_ERROR:
                raise ToolError(told(error)) from error
            raise SandboxUnavailable(f"{self.where}: {told(error)}") from error

    async def _kept(self, connection: _Connection) -> bool:
        """Whether ``connection`` still works. If not, close it; its pending calls fail."""
        if await connection.answers():
            return True
        opening = self._opening
        if opening is not None and opening.done() and not opening.exception() and opening.result() is connection:
            self._opening = None
            connection.holder.cancel()
        return False

    async def _opened(self) -> _Connection:
        """The connection, opened if necessary. Concurrent calls wait for the same opening."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._opening is opening:
                self._opening = None
            raise

    async def _open(self) -> _Connection:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        holder = asyncio.ensure_future(self._hold(opened))
        try:
            async with self._limit("answer"):
                return _Connection(await opened, holder)
        except BaseException:
            holder.cancel()
            raise

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Enter and exit the session in one task, as the SDK's cancel scopes require."""
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
        headers = {name: os.environ[variable] for name, variable in server.headers_env.items()}
        if server.token_env:
            headers["Authorization"] = f"Bearer {os.environ[server.token_env]}"
        timeout = httpx2.Timeout(server.timeout_s, read=None)  # each call has its own limit
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
        return streamable_http_client(server.url, http_client=http)

    async def _leave(self) -> None:
        if self._opening is not None:
            holder = (await self._opening).holder
            holder.cancel()
            await asyncio.wait([holder])

    @asynccontextmanager
    async def _limit(self, what: str) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(self._server.timeout_s):
                yield
        except TimeoutError as late:
            raise ConnectionError(f"no {what} within timeout_s = {self._server.timeout_s:g}") from late


def _sync(work: Coroutine[Any, Any, FoundT], timeout_s: float | None = None) -> FoundT:
    future = asyncio.run_coroutine_threadsafe(work, _thread())
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise


def told(error: BaseException) -> str:
    """The message of the innermost exception in nested exception groups."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return told(inner[0]) if inner else str(error) or type(error).__name__
