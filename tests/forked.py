"""Programs in processes that are forked from one that has imported torch, Megatron and verl.

These imports cost a process nine seconds of a core, what it then does often fewer. The first call
starts the process that is forked from; it ends with pytest. What starts Ray runs by tests.scenario:
Ray reads how it authenticates once, when it is imported.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retool_mcore.platforms.base import get_platform
from retool_mcore.process import die_with_parent
from tests.scenario import ROOT

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preloaded"])


def start(
    program: str, words: Sequence[str | Path], env: Mapping[str, str], *, out: Path, err: Path, cwd: Path = ROOT
) -> BaseProcess:
    """A module, or a script's path, as __main__; ``env`` is its whole environment.

    It appends to the two files.
    """
    arguments = (program, [str(word) for word in words], dict(env), out, err, cwd)
    process = SERVER.Process(target=_run, args=arguments)
    process.start()
    return process


def run(
    program: str, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, for commands whose start is not what a test is about."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = start(program, words, os.environ if env is None else env, out=out, err=err, cwd=cwd)
        child.join(timeout_s)
        child.kill()
        child.join()
        return subprocess.CompletedProcess([program, *words], child.exitcode or 0, out.read_text(), err.read_text())


def run_scenario(module: str, *words: str | Path, timeout_s: float = 500) -> Any:
    """As tests.scenario's."""
    done = run(module, *words, env={**os.environ, **get_platform("cpu").process_env()}, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _run(program: str, words: list[str], env: dict[str, str], *files: Path) -> None:
    die_with_parent()
    os.setsid()
    *streams, cwd = files
    for path, descriptor in zip(streams, (1, 2), strict=True):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [program, *words]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    atexit._run_exitfuncs()  # a forked process ends without them
