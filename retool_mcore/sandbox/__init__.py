"""The code sandbox. It needs neither torch nor a model; README.md has an example.

- ``open_sandbox`` opens a sandbox on this machine or connects to sandbox servers by URL.
- ``Sandbox.execute`` runs code and returns an ``ExecResult``. Calls with the same ``session`` share
  definitions; ``Sandbox.end_session`` discards them.
- ``Level`` is the isolation level of an execution; ``min_level`` is the weakest level you accept.

Whatever the code does, its outcome is a result, never an exception. ``SandboxUnavailable`` means
that the sandbox failed; ``ConfigError`` means that no sandbox would accept the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox

__all__ = ["ConfigError", "ExecRequest", "ExecResult", "Level", "Sandbox", "SandboxUnavailable", "open_sandbox"]


def open_sandbox(
    spec: str | Sequence[str] = "local",
    *,
    min_level: str = "namespaces",
    workers: int | None = None,
    sessions: int = 0,
    python: str = "",
    preload: Sequence[str] = (),
) -> Sandbox:
    """Open a sandbox: ``spec`` is ``"local"``, one server URL, or several.

    The servers speak SandboxFusion's protocol at ``http://host:port``, ``https://host:port`` or
    ``unix:///path/to.sock``; each call goes to the least busy one. ``workers`` is the maximum
    number of concurrent executions (default: the CPUs this process may use). With URLs, it is the
    maximum number of calls in flight per URL, on average (default: 64). ``sessions`` is the
    maximum number of interpreters kept alive between calls; 0 disables sessions. With URLs, each
    server has its own maximum.

    A server that does not report its level (SandboxFusion's own does not) is accepted, with a
    warning, only when ``min_level`` is ``none`` or ``rlimits``.

    ``python`` is the absolute path of the interpreter that runs the code (default: this one).
    ``preload`` lists modules to import into its warm image in addition to the mathematics packages.
    Both apply only to ``"local"``; a server takes them as command-line options.

    Nothing starts before the first call or ``async with``. That first use raises when the level in
    force is below ``min_level``: SandboxUnavailable from the local sandbox, ConfigError from a
    remote one. It also raises ConfigError when ``python`` cannot run the sandbox or cannot import a
    ``preload`` module. This function itself raises ConfigError for an invalid argument.
    """
    if min_level not in list(Level):
        raise ConfigError(f"Unknown min_level {min_level!r}. Choose one of: {', '.join(Level)}.")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers = {workers} must be at least 1.")
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
            f"sandbox.python = {python!r} and sandbox.preload = {list(preload)!r} do not apply to the server {spec!r}. "
            "Start that server with --python PATH and --preload MODULE instead."
        )
    from retool_mcore.sandbox.client import RemoteSandbox

    return RemoteSandbox(urls, min_level=Level(min_level), workers_per_url=workers or 64, sessions=sessions > 0)
