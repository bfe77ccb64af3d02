"""Runs a script as an ordinary user, whose executions have the same uid as the trainer."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sandbox.sandbox_helpers import ROOT

UID = 1500


@dataclass(frozen=True)
class OrdinaryUser:
    """A directory that the user owns, and a Python that it may execute."""

    python: str
    home: Path

    def run(self, code: str, *arguments: str, as_root: bool = False) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in the user's directory; skip the test if a level is not supported."""
        if as_root and os.geteuid() != 0:
            pytest.skip("requires root")
        as_user = {} if as_root or os.geteuid() != 0 else {"user": UID, "group": UID, "extra_groups": []}
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(self.home)}
        result = subprocess.run(
            [self.python, "-B", "-c", code, *arguments],
            cwd=self.home, timeout=300, capture_output=True, text=True, check=False, env=environment, **as_user,
        )  # fmt: skip
        if "does not support min_level" in result.stderr:
            pytest.skip(result.stderr[-600:])
        return result

    def run_attacks(self, level: str) -> dict[str, bool]:
        """Run ``table.py`` at ``level`` as this user. Returns whether each attack failed."""
        result = self.run("from tests.sandbox.table import main; main()", level)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)


def make_ordinary_user(home: Path) -> OrdinaryUser:
    """Create the user, and a virtual environment in ``home`` with the packages of this one."""
    if os.geteuid() != 0:
        return OrdinaryUser(sys.executable, home)
    candidates = (shutil.which("python3", path="/usr/bin"), sys.executable)
    python = next((path for path in candidates if path and _is_usable(path)), None) or _copy_of_python(home / "python")
    home.chmod(0o755)
    os.chown(home, UID, UID)
    subprocess.run([python, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    (site_packages,) = (home / "venv/lib").glob("python*/site-packages")
    installed = next(path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "shared.pth").write_text(installed)
    return OrdinaryUser(str(home / "venv/bin/python"), home)


def _copy_of_python(folder: Path) -> str:
    """Copy this Python, whose folder is closed to other users. Returns the copy's path.

    A shared build has the path of its libraries in the file, which the copy replaces.
    """
    unneeded = shutil.ignore_patterns("test", "site-packages", "config-*", "__pycache__")
    shutil.copytree(sys.base_prefix, folder, symlinks=True, ignore=unneeded)
    python, libraries = folder / "bin" / Path(sys.executable).resolve().name, f"{sys.base_prefix}/lib\0".encode()
    python.write_bytes(python.read_bytes().replace(libraries, b"$ORIGIN/../lib".ljust(len(libraries), b"\0")))
    return str(python)


def _is_usable(python: str) -> bool:
    """Whether an ordinary user may execute it, and its version is this one's."""
    real = Path(python).resolve()
    version = subprocess.check_output([python, "-c", "import sys; print(sys.version_info[:2])"], text=True)
    executable = all(parent.stat().st_mode & 0o001 for parent in (real, *real.parents))
    return executable and version.strip() == str(sys.version_info[:2])
