"""Run by test_watchdog.py in its own process: a run that works, stalls or ignores signals.

Words: what it does, the run's root, train.stall_s.
"""

import os
import signal
import subprocess
import sys
import time

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RunError
from retool_mcore.process import die_with_parent, redirect_output
from retool_mcore.run import heartbeat
from retool_mcore.train import watchdog


def wait_for_ever() -> None:
    time.sleep(60)


def main(what: str, root: str, stall_s: str) -> int:
    settings = [f"run.root={root}", "run.name=run", f"train.stall_s={stall_s}"]
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", settings)
    config.run.dir.mkdir(parents=True)
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(argv, preexec_fn=die_with_parent)  # noqa: PLW1509
    try:
        log, rank = config.run.dir / "logs" / "run.log", int(os.environ.get("RANK", "0"))
        with redirect_output(log) as terminal, watchdog.Watchdog(config, terminal, rank) as dog:
            if what == "deaf":
                watchdog.GRACE_S = 1.0
                signal.pthread_sigmask(signal.SIG_BLOCK, [watchdog.STALLED])
            if what == "lost":
                watchdog.POLL_S, watchdog.LOST_GRACE_S = 0.2, 0.5
                signal.pthread_sigmask(signal.SIG_BLOCK, [watchdog.STALLED])
                answers = [None, RunError("a worker died")]
                with dog.polling(lambda: answers.pop(0)):
                    child.wait()
            heartbeat.start(config.run.dir)
            if what == "working":
                for _ in range(10):
                    heartbeat.send()
                    time.sleep(0.5)
            else:
                wait_for_ever()
    except RunError as error:
        print(error)
        return 2
    finally:
        child.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
