"""What early_servers_scenario.py has SGLang's processes do: a file that imports little else."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import setproctitle

IMPORTED = "tabnanny"  # which nobody else imports


def tell(told: Connection) -> None:
    setproctitle.setproctitle("sglang::scheduler")
    title = Path("/proc/self/cmdline").read_text(encoding="utf-8").partition("\0")[0]
    told.send([os.getpid(), IMPORTED in sys.modules, os.environ.get("RETOOL_TEST"), title])


def write_devices(path: str) -> None:
    Path(path).write_text(os.environ["CUDA_VISIBLE_DEVICES"], encoding="utf-8")
