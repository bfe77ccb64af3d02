"""MCP (Model Context Protocol) servers whose tools the model may call."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveFloat, Section


class McpServer(Section):
    """One server of rollout.mcp: a command that speaks MCP over stdio, or an HTTP URL."""

    command: str = ""
    """The program, started in each process that runs trajectories. Set this or url."""

    args: list[str] = Field(default=[])
    """The program's arguments."""

    env: dict[str, str] = Field(default={})
    """Further environment variables; the SDK passes on only a few, such as PATH and HOME."""

    inherit: list[str] = Field(default=[])
    """Variables to pass on from the run's environment, such as one with an API key."""

    url: str = ""
    """Address of a server that speaks streamable HTTP. Set this or command."""

    token_env: str = ""
    """With url: the environment variable with the bearer token."""

    headers_env: dict[str, str] = Field(default={})
    """With url: more headers, each with the environment variable that has its value."""

    tools: list[str] = Field(default=[])
    """Tools to offer, by the server's names; []: all."""

    max_calls: Annotated[int, Field(ge=0)] = 0
    """Maximum calls of each tool per trajectory; 0: only the limits of [rollout] apply."""

    timeout_s: PositiveFloat = 30.0
    """Seconds for one call, and for the server's first answer."""

    @model_validator(mode="after")
    def _check_one_transport(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server needs either command or url. Set exactly one of them")
        if self.command and (self.token_env or self.headers_env):
            raise ValueError("token_env and headers_env need url. Name the variables of a command in inherit")
        if self.url and (self.args or self.env or self.inherit):
            raise ValueError("args, env and inherit need command, but this server has a url. Leave them out")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'url = "{self.url}" must begin with http:// or https://')
        return self
