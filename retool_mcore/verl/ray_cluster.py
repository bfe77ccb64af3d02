"""Which Ray cluster a run uses: its own on one node, the launch script's otherwise.

Ray's own processes take 13 to 16 s to come up on an H100 node. They do so while the driver checks
and imports, so they are started by a process of their own, which waits for them.
"""

import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from retool_mcore.config import RlConfig
from retool_mcore.errors import PlatformError, RunError
from retool_mcore.platforms.base import Platform
from retool_mcore.process import without_hangups
from retool_mcore.run.temporary import remove_when_quiet
from retool_mcore.verl.keys.key import values
from retool_mcore.verl.keys.trainer import RAY, RAY_INIT

END_S = 10.0  # Ray's processes, which end their workers first

Join = Callable[[], dict[str, Any]]


@contextmanager
def cluster(config: RlConfig, platform: Platform) -> Generator[Join]:
    """Start the Ray of a run on one node; it ends with the block. Changes RAY_ADDRESS.

    Yields what waits for it and returns the arguments of ``ray.init`` that join it. That raises
    RunError when Ray has not started.
    """
    if config.cluster.nodes > 1:
        yield dict
        return
    # Ray would join whatever it names: some other user's or program's cluster, or a dead one.
    os.environ.pop("RAY_ADDRESS", None)  # or the run's processes inherit it
    with ray_folder(config.run.dir) as folder:
        with without_hangups():
            head, joined = _start({**_of_start(config, platform), "_temp_dir": str(folder)}), False

        def join() -> dict[str, Any]:
            nonlocal joined
            assert head.stdout is not None
            if not (address := head.stdout.readline().strip()):
                log = config.run.dir / "logs" / "rl.log"
                raise RunError(f"Ray did not start; {log} says why at its end. The same command tries again.")
            joined = True
            return {"address": address}

        try:
            yield join
        finally:
            _end(head, gently=joined)


def _of_start(config: RlConfig, platform: Platform) -> dict[str, Any]:
    """The arguments of ``ray.init`` that make a cluster: those in verl's settings."""
    keys = {**values(RAY, config, platform), **config.verl_overrides}
    return {key.removeprefix(RAY_INIT): value for key, value in keys.items() if key.startswith(RAY_INIT)}


def _start(arguments: dict[str, Any]) -> subprocess.Popen[str]:
    """In a session of its own: no Ctrl-C, no closed terminal reaches it before this process.

    What Ray's processes hold is saved first. Raylet would start a worker for each core at once,
    none of which has the run's runtime_env: no actor ever gets one.
    """
    argv = [sys.executable, "-m", "retool_mcore.verl.ray_head", json.dumps(arguments)]
    variables = {"RAY_prestart_worker_first_driver": "0", **os.environ}
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(argv, env=variables, stdin=null, stdout=pipe, text=True, start_new_session=True)


def _end(process: subprocess.Popen[Any], *, gently: bool) -> None:
    """Let it end what it has started; a Ray that nobody has joined holds nothing, and is killed."""
    if gently:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def ray_folder(run_dir: Path) -> Generator[Path]:
    """Where Ray keeps sockets and logs of this run, gone afterwards; launch/nodes.sh has the same.

    Its name is short, since 107 bytes is all that a socket's path may have, and known to the next
    start, which removes what a killed one has left. Raises PlatformError when it is another user's.
    """
    parent = Path(f"/tmp/retool-ray-{os.getuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.lstat().st_uid != os.getuid():
        raise PlatformError(f"{parent} belongs to another user, and Ray's sockets would be theirs to read. Remove it.")
    folder = parent / f"{zlib.crc32(str(run_dir.resolve()).encode())}.0"
    remove_when_quiet(folder)
    try:
        yield folder
    finally:
        remove_when_quiet(folder)
