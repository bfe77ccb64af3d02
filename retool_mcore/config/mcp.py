"""A server of the Model Context Protocol whose tools the model may call."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveFloat, Section


class McpServer(Section):
    """One server of rollout.mcp: a command that speaks over stdio, or the URL of one over HTTP."""

    command: str = ""
    """The program, started in each process that runs trajectories; or url."""

    args: list[str] = Field(default=[])
    """The program's arguments."""

    env: dict[str, str] = Field(default={})
    """Its environment beside the few variables that the SDK hands on, PATH and HOME among them."""

    inherit: list[str] = Field(default=[])
    """Variables of the run's own environment to hand on, such as one that holds a key."""

    url: str = ""
    """Where a server answers over streamable HTTP; or command."""

    token_env: str = ""
    """With url: the environment variable whose value is the bearer token."""

    headers_env: dict[str, str] = Field(default={})
    """With url: more headers, each with the environment variable that holds its value."""

    tools: list[str] = Field(default=[])
    """Those to offer, by the server's names; none named: all."""

    max_calls: Annotated[int, Field(ge=0)] = 0
    """Calls of each tool in one trajectory; 0: as many as [rollout] allows."""

    timeout_s: PositiveFloat = 30.0
    """Seconds for one call, and for the first answer of a server that is started or reached."""

    @model_validator(mode="after")
    def _check_one_transport(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a command, started here, or a url; give one of the two")
        if self.command and (self.token_env or self.headers_env):
            raise ValueError("token_env and headers_env go with url; name a command's variables in inherit")
        if self.url and (self.args or self.env or self.inherit):
            raise ValueError("args, env and inherit are a command's, and this server has a url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'url = "{self.url}" does not begin with http:// or https://')
        return self
