"""User-defined tools (``rollout.tools``), with or without the code interpreter.

    class Lookup(Tool):
        name = "lookup"
        description = "Looks up a word in a book."
        parameters = {"type": "object", "properties": {"word": {"type": "string"}}}

        async def call(self, arguments, state):
            return BOOK.get(arguments["word"], "nothing")

One object serves all trajectories of a process. ``start`` creates the state of a trajectory, each
``call`` receives it, and ``end`` releases it and may return numbers for the reward function. The
loop validates arguments against ``parameters`` before a call. The model reads validation errors and
``ToolError`` messages as the call's result.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from retool_mcore.config.imports import import_object
from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import ConfigError, ReToolError
from retool_mcore.rollout import schemas
from retool_mcore.sandbox.base import Sandbox

MAX_TOOL_CHARS = 32_768  # of the tool's schema: name, description and parameters
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # OpenAI's rule for function names


class ToolError(Exception):
    """The model's mistake: the call cannot be answered. The model reads the message."""


class ToolFailed(ReToolError, RuntimeError):
    """A tool raised an exception that the loop does not handle. The loop drops the trajectory."""


@dataclass(frozen=True, kw_only=True)
class ToolContext:
    """The context of a trajectory for ``Tool.start``. The model does not see it.

    ``truth``: the row's reward_model.ground_truth. ``extra_info``: the row's column of that name.
    `retool eval` sets neither ``data_source`` nor ``extra_info``; `retool rollout` does not set
    ``truth`` either. ``sandbox``: the run's sandbox. With sandbox.sessions, the trajectory's
    interpreter session in it is named ``trajectory_id``.
    """

    trajectory_id: str = ""
    truth: str = ""
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sandbox: Sandbox | None = None


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """A call's result: the text for the model, and whether the call counts as successful."""

    text: str
    ok: bool = True


class Tool(ABC):
    """Base class of user-defined tools; see the module docstring for an example.

    ``max_calls``: per trajectory; None for no limit other than those of [rollout].
    ``timeout_s``: for one attempt of a call. The loop cancels a longer attempt, and the model reads
    that it timed out. None: ``call`` raises TimeoutError itself. The loop retries after outages.
    ``hook_timeout_s``: for ``start`` and for ``end``.

    The loop abandons a hook that ignores its cancellation. It logs and counts exceptions
    (``behavior/tool_faults/*``; those that drop a trajectory are in rollout/dropped).
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    max_calls: int | None = None
    timeout_s: float | None = 30.0
    hook_timeout_s: float = 30.0

    async def start(self, context: ToolContext) -> Any:
        """Create the state of one trajectory. Called before its first call of this tool."""
        return None

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], state: Any) -> str | ToolResult:
        """Run one call. The calls of one turn may run concurrently.

        Raise ToolError for the model's mistake, and SandboxUnavailable for an outage, which the
        loop retries for rollout.max_outage_s. A TimeoutError means that the call took too long.
        Any other exception drops the trajectory.
        """

    async def end(self, state: Any) -> Mapping[str, float] | None:
        """Release the state. Called when the trajectory is over, if ``start`` succeeded.

        The reward function gets the returned numbers as ``behavior["tool_numbers"][NAME]``.
        Exceptions are logged and counted.
        """
        return None

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in OpenAI's format, as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def check_tool(where: str, tool: Any) -> Tool:
    """Return ``tool`` if a run can offer it. Raises ConfigError otherwise."""
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
    except (TypeError, ValueError) as error:  # SchemaRefused, or parameters that are not a mapping
        raise ConfigError(
            f"{where}: parameters of {tool.name} are not a usable JSON schema: {error}. Change the schema, or leave "
            "this tool out."
        ) from error
    if (size := len(json.dumps(tool.schema))) > MAX_TOOL_CHARS:
        raise ConfigError(
            f"{where}: name, description and parameters of the tool {tool.name!r} have {size} characters. The limit is "
            f"{MAX_TOOL_CHARS}, because every prompt contains them. Shorten them, or leave this tool out."
        )
    if tool.parameters.get("type") != "object":
        raise ConfigError(f'{where}: parameters of {tool.name} must describe an object. Add "type": "object".')
    return tool


@lru_cache(maxsize=4)
def open_tools(names: tuple[str, ...]) -> tuple[Tool, ...]:
    """The tools in ``rollout.tools`` other than the interpreter, created once per process.

    Each name refers to a Tool instance or to a subclass that takes no arguments. Raises
    ConfigError.
    """
    tools: list[Tool] = []
    for path in names:
        if path == TOOL_NAME:
            continue
        named, where = import_object("rollout.tools", path), f'rollout.tools = ["{path}"]'
        try:
            tools.append(check_tool(where, named() if isinstance(named, type) else named))
        except TypeError as error:  # an abstract class, or one that requires arguments
            raise ConfigError(f"{where}: {named!r} cannot be created without arguments: {error}") from error
    return tuple(tools)


def names_of(tools: Sequence[Tool], *, interpreter: bool = True) -> str:
    return ", ".join(map(repr, [*([TOOL_NAME] if interpreter else ()), *(tool.name for tool in tools)]))
