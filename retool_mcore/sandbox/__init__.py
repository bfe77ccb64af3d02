"""The code sandbox, which needs neither torch nor a model. README.md has an example.

- ``open_sandbox`` opens one: on this machine, or at the URLs of servers.
- ``Sandbox.execute`` runs code in it and returns an ``ExecResult``; ``session`` names definitions
  that survive between calls, and ``Sandbox.end_session`` forgets them.
- ``Level`` is how strongly an execution is isolated; ``min_level`` is what you insist on.

What the code does is never an error. A sandbox that cannot run it is ``SandboxUnavailable``, a
request that none would run is a ``ConfigError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from retool_mcore.errors import ConfigError, SandboxUnavailable
    from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox

__all__ = ["ConfigError", "ExecRequest", "ExecResult", "Level", "Sandbox", "SandboxUnavailable", "open_sandbox"]
_ERRORS = ("ConfigError", "SandboxUnavailable")


def __getattr__(name: str) -> Any:
    """Import a name on first use: the process that forks executions holds none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("retool_mcore.errors" if name in _ERRORS else f"{__name__}.base"), name)


def open_sandbox(
    spec: str | Sequence[str] = "local",
    *,
    min_level: str = "namespaces",
    workers: int | None = None,
    sessions: int = 0,
    python: str = "",
    preload: Sequence[str] = (),
) -> Sandbox:
    """Open the sandbox that ``spec`` names: ``"local"``, or one or several URLs.

    URLs are SandboxFusion-compatible, ``http://host:port`` or ``unix:///path/to.sock``; calls go to
    the least busy one. ``workers`` bounds the executions that run at once (default: the CPUs this
    process may use; for URLs, 64 per URL). ``sessions`` is the number of interpreters that may be
    kept alive between calls; 0 turns sessions off.

    A server that does not report its level (SandboxFusion itself) is accepted, with a warning, only
    when min_level is ``none`` or ``rlimits``.

    ``python`` is the interpreter that runs the code, by its absolute path (default: this one), and
    ``preload`` names modules that its warm image holds beyond those that mathematics needs. Both
    are for ``"local"``; a server has options of its own.

    Nothing starts before the first call or ``async with``. These raise when the level in force is
    below ``min_level``: SandboxUnavailable from the local sandbox, ConfigError from a remote one.
    ConfigError also when ``python`` cannot run the sandbox, or cannot import what ``preload``
    names. Raises ConfigError when an argument is not one of the above.
    """
    from retool_mcore.errors import ConfigError
    from retool_mcore.sandbox.base import Level

    if min_level not in list(Level):
        raise ConfigError(f"min_level = {min_level!r} is not a level. Use one of {', '.join(Level)}.")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers = {workers}: at least one execution must be able to run.")
    urls = [spec] if isinstance(spec, str) else list(spec)
    if urls == ["local"]:
        from retool_mcore.sandbox.supervisor.interpreter import Interpreter
        from retool_mcore.sandbox.supervisor.local import LocalSandbox

        interpreter = Interpreter(python, tuple(preload))
        return LocalSandbox(min_level=Level(min_level), workers=workers, sessions=sessions, interpreter=interpreter)
    if not urls or not all(url.startswith(("http://", "https://", "unix://")) for url in urls):
        raise ConfigError(f"sandbox = {spec!r} is neither 'local' nor a list of http://, https:// or unix:// URLs.")
    if python or preload:
        raise ConfigError(
            f"sandbox.python = {python!r} and sandbox.preload = {list(preload)!r}, but the code runs at {spec!r}: "
            "these belong to that server. Give them to it (--python PATH, --preload MODULE) and not here."
        )
    from retool_mcore.sandbox.client import RemoteSandbox

    return RemoteSandbox(urls, min_level=Level(min_level), workers_per_url=workers or 64, sessions=sessions > 0)
