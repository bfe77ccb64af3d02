"""Whether the paths of a run's Unix sockets are short enough: Linux takes 107 characters.

A temporary folder with a long name would end SFT at its first save, when Megatron starts a manager
of multiprocessing, and RL when Ray starts.
"""

import os
import tempfile
from collections.abc import Iterator

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError
from retool_mcore.preflight.findings import Finding, error, ok

PATH_CHARS = 107  # unix(7): 108 bytes with the last one, which is 0
# What libraries put below a temporary folder for the longest of their sockets.
MANAGER = "/pymp-xxxxxxxx/listener-xxxxxxxx"
RAY = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def sockets(config: RunConfig) -> Iterator[Finding]:
    """The folders under which the run's processes make sockets, and the sandbox's own."""
    yield _folder("TMPDIR", tempfile.gettempdir(), MANAGER, "multiprocessing")
    if not isinstance(config, RlConfig):
        return
    named = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "RAY_TMPDIR")
    yield _folder(named, os.environ.get(named, "/tmp"), RAY, "Ray")
    for url in config.sandbox.where:
        path = url.removeprefix("unix://")
        if path != url and (length := len(os.fsencode(path))) > PATH_CHARS:
            yield error("sockets", f"sandbox.where has a socket whose path has {length} characters, and Linux takes "
                        f"{PATH_CHARS}: {path}. Serve it under a shorter one.")  # fmt: skip


def require_short_sockets(config: RunConfig) -> None:
    """Raise ConfigError for a path that is too long."""
    if wrong := [finding.text for finding in sockets(config) if finding.severity == "error"]:
        raise ConfigError(" ".join(wrong))


def _folder(name: str, folder: str, below: str, whose: str) -> Finding:
    length, most = len(os.fsencode(os.path.abspath(folder))), PATH_CHARS - len(below)
    if length <= most:
        return ok("sockets", f"{name} = {folder} leaves room for those of {whose}")
    return error("sockets", f"{name} = {folder} has {length} characters. Below it {whose} makes sockets, whose paths "
                 f"may have {PATH_CHARS}: that leaves {most}. Set {name} to a shorter one, like /tmp.")  # fmt: skip
