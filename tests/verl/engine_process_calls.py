"""What early_servers_scenario.py has SGLang's processes do: a file that imports nothing else."""

import os
import sys
from multiprocessing.connection import Connection

IMPORTED = "tabnanny"  # which nobody else imports


def tell(told: Connection) -> None:
    told.send([os.getpid(), IMPORTED in sys.modules, os.environ.get("RETOOL_TEST")])
