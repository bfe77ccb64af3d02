"""The Python interpreter that runs model code: the trainer's, or one with separate packages."""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.child.packages import heavy_packages

_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# Our files that a zygote imports, and their folders. They may import only the standard library at
# their top level, because another interpreter does not have the trainer's packages.
_SOURCES = ("__init__.py", "errors.py", "sandbox/__init__.py", "sandbox/base.py", "sandbox/child", "sandbox/supervisor")


@dataclass(frozen=True)
class Interpreter:
    """The settings ``sandbox.python`` and ``sandbox.preload``; see config/sampling.py.

    Raises ConfigError for a path that is not absolute and for an invalid module name.
    """

    python: str = ""
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.python and not os.path.isabs(self.python):
            raise self.error("is not an absolute path")
        for name in self.preload:
            if not _MODULE_NAME.fullmatch(name):
                raise ConfigError(
                    f"sandbox.preload: {name!r} is not a module name. Use the name from `import NAME`, not the name of "
                    "the pip package (sklearn, not scikit-learn)."
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

    def error(self, what: str) -> ConfigError:
        """Build the error for an interpreter that cannot run the sandbox."""
        return ConfigError(
            f"sandbox.python = {self.python!r} {what}. Set it to the absolute path of a CPython 3.11 or newer. For "
            "example, `python3 -m venv /opt/sandbox` creates /opt/sandbox/bin/python."
        )

    def package_root(self, directory: Path) -> Path:
        """Return the directory to import ``retool_mcore`` from.

        For our own interpreter, that is our installation. For another one, copy the modules to
        ``directory``: our installation may be in the trainer's site-packages, which must not be on
        the other interpreter's path.
        """
        if not self.python:
            return PACKAGE_ROOT
        for name in _SOURCES:
            source, target = PACKAGE_ROOT / "retool_mcore" / name, directory / "retool_mcore" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, target)
        return directory
