"""Runs a script as an ordinary user, whose executions have the same uid as the trainer."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UID = 1500


@dataclass(frozen=True)
class OrdinaryUser:
    """A directory that the user owns, and a Python that it may execute."""

    python: str
    home: Path

    def run(
        self, code: str, *arguments: str, timeout_s: float = 300, as_root: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in the user's directory; skip the test if a level is not supported."""
        settings = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.home), "PYTHONDONTWRITEBYTECODE": "1"}
        if as_root and os.geteuid() != 0:
            pytest.skip("requires root")
        as_user = {} if as_root or os.geteuid() != 0 else {"user": UID, "group": UID, "extra_groups": []}
        result = subprocess.run(
            [self.python, "-c", code, *arguments],
            cwd=self.home, timeout=timeout_s, capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", **settings}, **as_user,
        )  # fmt: skip
        if "does not support min_level" in result.stderr:
            pytest.skip(result.stderr[-600:])
        return result

    def start(self, code: str) -> subprocess.Popen[str]:
        """Start ``code`` as the user, with pipes to it."""
        as_user = {} if os.geteuid() != 0 else {"user": UID, "group": UID, "extra_groups": []}
        return subprocess.Popen(
            [self.python, "-c", code], cwd=self.home, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}, **as_user,
        )  # fmt: skip

    def run_attacks(self, level: str) -> dict[str, bool]:
        """Run ``table.py`` at ``level`` as this user. Returns whether each attack failed."""
        code = "import sys; from tests.sandbox.table import main; main()"
        result = self.run(code, level)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def give(self, path: Path) -> Path:
        """Make the user the owner of ``path``."""
        if os.geteuid() == 0:
            os.chown(path, UID, UID, follow_symlinks=False)
        return path


def make_ordinary_user(home: Path) -> OrdinaryUser:
    """Create the user, and a virtual environment in ``home`` with the packages of this one."""
    if os.geteuid() != 0:
        return OrdinaryUser(sys.executable, home)
    python = next((p for p in (shutil.which("python3", path="/usr/bin"), sys.executable) if p and _executable(p)), None)
    if python is None or _version(python) != sys.version_info[:2]:
        pytest.skip(f"no Python {sys.version_info[0]}.{sys.version_info[1]} that an ordinary user may execute")
    home.chmod(0o755)
    os.chown(home, UID, UID)
    subprocess.run([python, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    (site_packages,) = (home / "venv/lib").glob("python*/site-packages")
    installed = next(path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "shared.pth").write_text(installed)
    return OrdinaryUser(str(home / "venv/bin/python"), home)


def _executable(python: str) -> bool:
    real = Path(python).resolve()
    return all(parent.stat().st_mode & 0o001 for parent in (real, *real.parents))


def _version(python: str) -> tuple[int, int]:
    text = subprocess.check_output([python, "-c", "import sys; print(*sys.version_info[:2])"], text=True)
    major, minor = text.split()
    return int(major), int(minor)
