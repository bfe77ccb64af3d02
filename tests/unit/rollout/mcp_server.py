"""A server for tests/unit/rollout/test_mcp.py, by the SDK: python mcp_server.py [--http PORT]."""

import asyncio
import os
import sys

from mcp import MCPError
from mcp.server import MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent

server = MCPServer("for tests")
made = 0


@server.tool()
def count(n: int) -> str:
    """Counts this server's calls of it, with the process that serves them."""
    global made  # noqa: PLW0603
    made += n
    return f"{made} in {os.getpid()}"


@server.tool()
def fails(n: int) -> CallToolResult:
    """Fails."""
    return CallToolResult(content=[TextContent(type="text", text=f"{n} is not wanted")], is_error=True)


@server.tool()
def refuses(code: int) -> str:
    """Answers with an error of the protocol."""
    raise MCPError(code, f"refused with {code}")


@server.tool()
async def waits(s: float) -> str:
    """Waits so many seconds."""
    await asyncio.sleep(s)
    return "waited"


@server.tool()
def dies() -> str:
    """Ends the server without an answer."""
    os._exit(7)


@server.tool()
def secret(name: str) -> str:
    """Returns a variable of the server's environment."""
    return os.environ.get(name, "not set")


@server.tool(name="draw.circle")
def draw() -> CallToolResult:
    """Draws."""
    image = ImageContent(type="image", data="aGk=", mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text="a circle"), image])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
