"""Records versions and hardware of a run, and compares the nodes of a run.

``<run>/environment.json`` describes the node that wrote it, at the latest start.
"""

import hashlib
import importlib.metadata
import json
import os
import platform as python_platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import retool_mcore
from retool_mcore.config import RunConfig
from retool_mcore.config.base import is_table
from retool_mcore.config.model import BUILT_IN
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.model.files import file_hash
from retool_mcore.platforms.base import Platform
from retool_mcore.run.checkpoint import flat
from retool_mcore.run.folder import write_atomic

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("torch", "verl", "megatron-core", "megatron-bridge", "ray", "sglang", "vllm", "transformers", "mindspeed")
CODE = "retool_mcore's *.py (SHA-256)"
NOT_INSTALLED = "not installed"


def write_environment(run_dir: Path, platform: Platform) -> None:
    """Write the versions and hardware of this node to ``<run>/environment.json``."""
    installed = {name: version for name, version in _versions().items() if version != NOT_INSTALLED}
    description = {"versions": installed, "hardware": _hardware(platform)}
    write_atomic(run_dir / ENVIRONMENT_FILE, json.dumps(description, indent=1) + "\n")


def read_environment(run_dir: Path) -> dict[str, dict[str, str]]:
    """Read the tables ``versions`` and ``hardware``; empty if the file is missing or unreadable."""
    try:
        tables: Any = json.loads((run_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not is_table(tables):
        return {}
    tables = {part: table for part, table in tables.items() if is_table(table)}
    return {part: {key: str(value) for key, value in table.items()} for part, table in tables.items()}


def _versions() -> dict[str, str]:
    """Return the versions of Python, this package and PACKAGES, or "not installed"."""
    versions = {"python": python_platform.python_version(), CODE: code_hash()}
    for package in ("retool_mcore", *PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = NOT_INSTALLED
    return versions


def _hardware(platform: Platform) -> dict[str, str]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = {"processor": _processor(), "cores": str(os.cpu_count()), "memory": f"{memory_gib:.0f} GiB"}
    try:
        return hardware | dict(platform.facts())
    except (PlatformError, OSError, subprocess.SubprocessError) as error:  # must not stop a run
        return hardware | {"devices": f"unknown: {error}"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else python_platform.machine()


def fingerprint(config: RunConfig) -> dict[str, str]:
    """Return the versions, file hashes and settings, which must be equal on every node.

    It is cheap enough to compute at every start.
    """
    entries = {"host": socket.gethostname(), **_versions()}
    entries |= {name: repr(value) for name, value in flat(config.model_dump()).items()}
    for name, path in config.data_files:
        entries[f"{name} = {path}"] = file_hash(Path(path))
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        entries[f"model.path, {name}"] = file_hash(Path(config.model.path) / name)
    if config.model.chat_template not in ("", *BUILT_IN):
        entries[f"model.chat_template = {config.model.chat_template}"] = file_hash(Path(config.model.chat_template))
    return entries


def code_hash() -> str:
    """Return the first 12 hex digits of the SHA-256 of this package's Python files."""
    folder = Path(retool_mcore.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def require_equal_nodes(nodes: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError if the fingerprint of a node differs from the first one's."""
    if different := differing(nodes):
        raise ConfigError(f"the nodes differ: {'; '.join(different)}. Use the same on every node.")


def differing(nodes: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one sentence per entry in which a node differs from the first, except the host."""
    first, *others = nodes
    return [
        f"{name} is {first.get(name, 'not set')} on {first['host']} and {other.get(name, 'not set')} on {other['host']}"
        for other in others
        for name in dict.fromkeys((*first, *other))
        if name != "host" and other.get(name) != first.get(name)
    ]
