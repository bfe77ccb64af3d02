"""A stopped benchmark ends its run and writes what it has."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.perf.test_bench import PERF

STOPPED = """
import sys
sys.path.insert(0, {perf!r})
from bench import run_to_its_end
with open({log!r}, "wb") as log:
    print("started", flush=True)
    code = run_to_its_end([sys.executable, "-c", {slow!r}], log)
print("kept", code, flush=True)
"""


SLOW_TO_STOP = """
import signal, sys, time
def leave(number, frame):
    print("stopping", flush=True)
    time.sleep(2)
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
print("running", flush=True)
time.sleep(60)
"""


def test_a_stopped_bench_ends_its_run_and_goes_on_to_write_what_it_has(tmp_path: Path):
    """timeout(1) asks twice: first the command, then its whole group, while the run is being
    stopped.
    """
    log = tmp_path / "log"

    def wait_for(word: bytes) -> None:
        deadline = time.monotonic() + 300
        while not (log.exists() and word in log.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.05)

    script = STOPPED.format(perf=str(PERF), log=str(log), slow=SLOW_TO_STOP)
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        bench.stdout.readline()
        for word in (b"running", b"stopping"):
            wait_for(word)
            bench.send_signal(signal.SIGTERM)
        assert bench.stdout.read().split() == ["kept", "143"]
