"""The Python that runs the model's code: the trainer's own, or one with packages of its own."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.child.packages import heavy_packages

_OLDEST = (3, 11)  # the zygote is started with -P
_ASK = "import json, sys; print({mark!r} + json.dumps([sys.implementation.name, *sys.version_info[:3]]))"
_MARK = "retool-sandbox-python:"
_ASK_TIMEOUT_S = 30.0
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# What a zygote imports of ours. It needs the standard library alone: another interpreter has no
# other package of the trainer's.
_MODULES = (
    "__init__", "errors",
    *(f"sandbox/{name}" for name in (
        "__init__", "child/__init__", "child/habits", "child/imports", "child/packages", "child/paths",
        "child/programs", "child/runner", "child/tracebacks", "supervisor/__init__", "supervisor/confine",
        "supervisor/guardian", "supervisor/kernel", "supervisor/reach", "supervisor/seccomp",
        "supervisor/zygote",
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Interpreter:
    """``sandbox.python`` and ``sandbox.preload``: see config/sampling.py.

    Raises ConfigError for a path that is not absolute and for what is no module's name.
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
        """The program that is started."""
        return self.python or sys.executable

    @property
    def heavy(self) -> frozenset[str]:
        """The packages that only the full image has."""
        return heavy_packages(self.preload)

    @property
    def library_path(self) -> str | None:
        """LD_LIBRARY_PATH, for our own Python only: the trainer's libraries are not another's."""
        return None if self.python else os.environ.get("LD_LIBRARY_PATH")

    async def check(self) -> None:
        """Ask another interpreter what it is. Raises ConfigError unless it can run the sandbox."""
        if self.python:
            await asyncio.to_thread(self._check)

    def _check(self) -> None:
        said = self._ask()
        found = re.search(re.escape(_MARK) + r"(\[.*\])$", said, re.MULTILINE)
        if found is None:
            raise self._error(f"is not a Python: asked for its version, it said {said.strip()[-300:]!r}")
        name, *version = json.loads(found[1])
        if name != "cpython" or tuple(version) < _OLDEST:
            is_told = f"is {name} {'.'.join(map(str, version))}, and the sandbox needs CPython"
            raise self._error(f"{is_told} {'.'.join(map(str, _OLDEST))} or newer")

    def _ask(self) -> str:
        command = [self.python, "-E", "-s", "-B", "-c", _ASK.format(mark=_MARK)]
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        with tempfile.TemporaryFile() as output:  # a pipe would wait for all that inherits it
            try:
                process = subprocess.Popen(
                    command, env=environment, cwd="/", start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
            except OSError as error:
                raise self._error(f"cannot be started: {error.strerror}") from error
            try:
                process.wait(_ASK_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise self._error(f"did not tell its version within {_ASK_TIMEOUT_S:.0f} s") from None
            output.seek(0)
            return output.read().decode(errors="replace")

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"sandbox.python = {self.python!r} {what}. Give the absolute path of a CPython 3.11 or newer, for example "
            "of an environment made by `python3 -m venv /opt/sandbox`: /opt/sandbox/bin/python."
        )

    def package_root(self, directory: Path) -> Path:
        """The directory that ``retool_mcore`` is imported from: ours, or copies in ``directory``.

        Ours may lie in the trainer's site-packages, which another interpreter must not have on its
        path.
        """
        if not self.python:
            return PACKAGE_ROOT
        for name in _MODULES:
            target = directory / "retool_mcore" / f"{name}.py"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE_ROOT / "retool_mcore" / f"{name}.py", target)
        return directory
