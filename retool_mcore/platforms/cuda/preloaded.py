"""python -m retool_mcore.platforms.cuda.preloaded WORD ...: python WORD ... as a scheduler starts.

Where an engine gives its memory back while the actor trains, torch_memory_saver's library is loaded
into its scheduler before all others.
"""

import os
import signal
import sys

from retool_mcore.process import die_with_parent


def main(*words: str) -> None:
    die_with_parent(signal.SIGTERM)
    from torch_memory_saver import configure_subprocess  # imports torch

    with configure_subprocess():
        os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
