"""Tools of a user's own, beside the code interpreter or without it: ``rollout.tools``.

    class Lookup(Tool):
        name = "lookup"
        description = "Returns what a book says of a word."
        parameters = {"type": "object", "properties": {"word": {"type": "string"}}}

        async def call(self, arguments, state):
            return BOOK.get(arguments["word"], "nothing")

One object serves all trajectories of a process. What belongs to one trajectory is made in
``start``, handed to each of its calls, and given up in ``end``, which may return numbers for the
reward. Arguments are checked against
``parameters`` before a call; what does not fit is told to the model, as is a ``ToolError``.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from retool_mcore.config.named import load_named
from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import ConfigError
from retool_mcore.rollout import schemas
from retool_mcore.sandbox.base import Sandbox

MAX_TOOL_CHARS = 32_768  # of name, description and parameters
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # as OpenAI's schemas have it


class ToolError(Exception):
    """A call that cannot be answered as it was asked; its text is told to the model."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a trajectory starts from, as a tool sees it. The model sees nothing of it.

    ``truth`` is the row's reward_model.ground_truth, ``extra_info`` its column of that name; in
    `retool eval` there is no ``data_source`` and no ``extra_info``, and in `retool rollout` no
    ``truth`` either. ``sandbox`` is the run's; the interpreter's session in it, with
    sandbox.sessions, is named as the trajectory.
    """

    trajectory_id: str = ""
    truth: str = ""
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sandbox: Sandbox | None = None


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a call gave: the text that the model sees, and whether it counts as one that ran."""

    text: str
    ok: bool = True


class Tool(ABC):
    """A tool that the model may call; see the module.

    ``max_calls``: of one trajectory, None for no limit beside those of [rollout]. ``timeout_s``: of
    one attempt of a call, after which it is cancelled and the model is told; outages are retried.
    None: the call raises TimeoutError itself. ``hook_timeout_s``: of ``start`` and of ``end``. A
    hook that goes on after it was cancelled is left alone; faults are logged and counted
    (``behavior/tool_faults/*``; those that drop a trajectory are in rollout/dropped).
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    max_calls: int | None = None
    timeout_s: float | None = 30.0
    hook_timeout_s: float = 30.0

    async def start(self, given: Given) -> Any:
        """The state of one trajectory, made before its first call of this tool."""
        return None

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], state: Any) -> str | ToolResult:
        """Answer one call. Calls of one turn run side by side.

        Raises ToolError for what the model did wrong, SandboxUnavailable for an outage, which is
        retried for rollout.max_outage_s; any other exception drops the trajectory.
        """

    async def end(self, state: Any) -> Mapping[str, float] | None:
        """The trajectory is over. Called where ``start`` was; what it raises is counted.

        The numbers that it returns are the reward function's: ``behavior["found"][NAME]``.
        """
        return None

    @property
    def schema(self) -> dict[str, Any]:
        """The function's schema, as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def check_tool(where: str, tool: Any) -> Tool:
    """``tool`` if a run can offer it. Raises ConfigError."""
    if not isinstance(tool, Tool):
        raise ConfigError(f"{where}: {tool!r} is neither a retool_mcore.rollout.tools.Tool nor a subclass of it.")
    if not inspect.iscoroutinefunction(tool.call):
        raise ConfigError(f"{where}: call of {type(tool).__name__} is not async. Write: async def call(self, ...).")
    for name in ("name", "description"):
        if not (isinstance(getattr(tool, name, None), str) and getattr(tool, name)):
            raise ConfigError(f"{where}: {type(tool).__name__} has no {name}.")
    if not _NAME.fullmatch(tool.name) or tool.name == TOOL_NAME:
        raise ConfigError(
            f"{where}: a tool cannot be named {tool.name!r}. Use letters, digits, _ and -; not {TOOL_NAME}."
        )
    try:
        schemas.check(dict(tool.parameters))
    except (TypeError, ValueError) as error:  # SchemaRefused, or what is no table
        raise ConfigError(
            f"{where}: parameters of {tool.name} are no JSON schema that can be used: {error}. Change the schema, or "
            "leave this tool out."
        ) from error
    if (size := len(json.dumps(tool.schema))) > MAX_TOOL_CHARS:
        raise ConfigError(
            f"{where}: name, description and parameters of the tool {tool.name!r} have {size} characters, and at most "
            f"{MAX_TOOL_CHARS} are taken, as every prompt contains them. Shorten them, or leave this tool out."
        )
    if tool.parameters.get("type") != "object":
        raise ConfigError(f'{where}: parameters of {tool.name} describe no object: write "type": "object".')
    return tool


@lru_cache(maxsize=4)
def open_tools(names: tuple[str, ...]) -> tuple[Tool, ...]:
    """The tools that ``rollout.tools`` names beside the interpreter, once in a process.

    Each is a subclass of Tool, which is made without arguments, or an object of one. Raises
    ConfigError.
    """
    tools: list[Tool] = []
    for path in names:
        if path == TOOL_NAME:
            continue
        found, where = load_named("rollout.tools", path), f'rollout.tools = ["{path}"]'
        try:
            tools.append(check_tool(where, found() if isinstance(found, type) else found))
        except TypeError as error:  # an abstract class, or one that wants arguments
            raise ConfigError(f"{where}: {found!r} cannot be made without arguments: {error}") from error
    return tuple(tools)


def complaint(tool: Tool, arguments: Any) -> str | None:
    """Why ``arguments`` do not fit the tool, in words for the model; None where they do."""
    return schemas.complaint(tool.name, tool.parameters, arguments)


def names_of(tools: Sequence[Tool], *, interpreter: bool = True) -> str:
    return ", ".join(map(repr, [*([TOOL_NAME] if interpreter else ()), *(tool.name for tool in tools)]))
