"""The Python interpreter that runs model code: the trainer's, or one with separate packages."""

import os
import re
import sys
from dataclasses import dataclass

from retool_mcore.errors import ConfigError

_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


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

    def error(self, what: str) -> ConfigError:
        """Build the error for an interpreter that cannot run the sandbox."""
        return ConfigError(
            f"sandbox.python = {self.python!r} {what}. Set it to the absolute path of a CPython 3.11 or newer. For "
            "example, `python3 -m venv /opt/sandbox` creates /opt/sandbox/bin/python."
        )
