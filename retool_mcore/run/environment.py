"""On what a run ran, for people who read about it later: ``<run>/environment.json``.

Versions and hardware are those of the node that writes the run's files, at its newest start.
"""

import importlib.metadata
import json
import os
import platform as python_platform
import subprocess
from pathlib import Path
from typing import Any

from retool_mcore.config.base import is_table
from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import Platform
from retool_mcore.run.fingerprint import PACKAGES, code_hash
from retool_mcore.run.folder import write_whole

ENVIRONMENT_FILE = "environment.json"


def write_environment(run_dir: Path, platform: Platform) -> None:
    """Write versions and hardware of this node into the run's folder."""
    found = {"versions": _versions(), "hardware": _hardware(platform)}
    write_whole(run_dir / ENVIRONMENT_FILE, json.dumps(found, indent=1) + "\n")


def read_environment(run_dir: Path) -> dict[str, dict[str, str]]:
    """``versions`` and ``hardware`` by name; empty where the run has not written them."""
    try:
        found: Any = json.loads((run_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not is_table(found):
        return {}
    return {part: {key: str(value) for key, value in table.items()} for part, table in found.items() if is_table(table)}


def _versions() -> dict[str, str]:
    versions = {"python": python_platform.python_version(), "retool_mcore's *.py (SHA-256)": code_hash()}
    for package in ("retool_mcore", *PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _hardware(platform: Platform) -> dict[str, str]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"processor": _processor(), "cores": str(os.cpu_count()), "memory": f"{memory_gib:.0f} GiB"}
    try:
        return found | dict(platform.facts())
    except (PlatformError, OSError, subprocess.SubprocessError) as error:  # a run does not end for this
        return found | {"devices": f"not told: {error}"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else python_platform.machine()
