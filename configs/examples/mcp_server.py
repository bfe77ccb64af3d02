"""A small MCP server over stdio: rollout.mcp = { library = { command = "python", args = [FILE] } }.

It uses the official SDK. `python configs/examples/mcp_server.py --http PORT` serves over HTTP.
"""

import sys
from pathlib import Path

from mcp.server import MCPServer

FACTS = Path(__file__).with_name("facts.txt").read_text(encoding="utf-8").splitlines()
server = MCPServer("library")


@server.tool()
def search(word: str) -> str:
    """Returns the facts of mathematics that contain the word."""
    return "\n".join(fact for fact in FACTS if word.lower() in fact.lower()) or "Nothing was found."


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
