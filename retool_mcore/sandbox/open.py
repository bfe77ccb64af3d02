"""Opens the sandbox that a setting names.

Only the chosen one is imported, because the local one runs on Linux alone.
"""

from collections.abc import Sequence

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.base import Level, Sandbox


def open_sandbox(
    spec: str | Sequence[str] = "local",
    *,
    min_level: str = Level.NAMESPACES,
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
    ConfigError also when ``python`` is none that can run the sandbox, or cannot import what
    ``preload`` names. Raises ConfigError when an argument is not one of the above.
    """
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
