"""The Python interpreter that runs model code: the trainer's, or one with separate packages."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.child.packages import heavy_packages

_MARK = "retool-sandbox-python:"
# The zygote is started with -P, which requires Python 3.11.
_ASK = f"import sys; print('{_MARK}', sys.implementation.name == 'cpython' and sys.version_info >= (3, 11))"
_ASK_TIMEOUT_S = 30.0
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# Modules of ours that a zygote imports. They may use only the standard library, because another
# interpreter does not have the trainer's packages.
_MODULES = (
    "__init__", "errors",
    *(f"sandbox/{name}" for name in (
        "__init__", "child/__init__", "child/habits", "child/packages", "child/paths", "child/programs",
        "child/runner", "child/tracebacks", "supervisor/__init__", "supervisor/confine", "supervisor/guardian",
        "supervisor/kernel", "supervisor/reach", "supervisor/seccomp", "supervisor/zygote",
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Interpreter:
    """The settings ``sandbox.python`` and ``sandbox.preload``; see config/sampling.py.

    Raises ConfigError for a path that is not absolute and for an invalid module name.
    """

    python: str = ""
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.python and not os.path.isabs(self.python):
            raise self._error("is not an absolute path")
        for name in self.preload:
            if not _MODULE_NAME.fullmatch(name):
                raise ConfigError(
                    f"sandbox.preload: {name!r} is not a module's name, as in `import scipy.stats`. It names modules, "
                    "not packages of pip (sklearn, not scikit-learn)."
                )

    @property
    def executable(self) -> str:
        """Path of the Python executable to start."""
        return self.python or sys.executable

    @property
    def heavy(self) -> frozenset[str]:
        """Names of packages that only the full image imports."""
        return heavy_packages(self.preload)

    @property
    def library_path(self) -> str | None:
        """LD_LIBRARY_PATH for our own Python; None for another: our libraries may not fit it."""
        return None if self.python else os.environ.get("LD_LIBRARY_PATH")

    async def check(self) -> None:
        """Query the version of a configured interpreter. Raises ConfigError if it is unsuitable."""
        if self.python:
            await asyncio.to_thread(self._check)

    def _check(self) -> None:
        try:
            done = subprocess.run(
                [self.python, "-E", "-s", "-B", "-c", _ASK], capture_output=True, text=True, errors="replace",
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, cwd="/", timeout=_ASK_TIMEOUT_S, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise self._error(f"cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise self._error(f"did not tell its version within {_ASK_TIMEOUT_S:.0f} s") from None
        if done.stdout.split()[-2:] != [_MARK, "True"]:
            said = (done.stdout + done.stderr).strip()[-300:]
            raise self._error(f"is no CPython 3.11 or newer; asked for its version, it answered {said!r}")

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"sandbox.python = {self.python!r} {what}. Give the absolute path of a CPython 3.11 or newer, for example "
            "of an environment made by `python3 -m venv /opt/sandbox`: /opt/sandbox/bin/python."
        )

    def package_root(self, directory: Path) -> Path:
        """Return the directory to import ``retool_mcore`` from.

        For our own interpreter, that is our installation. For another one, copy the modules to
        ``directory``: our installation may be in the trainer's site-packages, which must not be on
        the other interpreter's path.
        """
        if not self.python:
            return PACKAGE_ROOT
        for name in _MODULES:
            target = directory / "retool_mcore" / f"{name}.py"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE_ROOT / "retool_mcore" / f"{name}.py", target)
        return directory
