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
    from retool_mcore.errors import ConfigError, SandboxUnavailable
    from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
    from retool_mcore.sandbox.open import open_sandbox

__all__ = ["ConfigError", "ExecRequest", "ExecResult", "Level", "Sandbox", "SandboxUnavailable", "open_sandbox"]
_MODULES = {
    "ConfigError": "retool_mcore.errors",
    "ExecRequest": "retool_mcore.sandbox.base",
    "ExecResult": "retool_mcore.sandbox.base",
    "Level": "retool_mcore.sandbox.base",
    "Sandbox": "retool_mcore.sandbox.base",
    "SandboxUnavailable": "retool_mcore.errors",
    "open_sandbox": "retool_mcore.sandbox.open",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: the process that forks executions holds none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
