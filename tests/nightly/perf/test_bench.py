"""A stopped benchmark ends its run and writes what it has."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
def test_planned_turns_fill_their_share_of_the_response():
    script = (
        f"import sys, random; sys.path.insert(0, {str(PERF)!r})\n"
        "from retool_mcore.platforms import get_platform\n"
        "get_platform('cpu').activate()\n"
        "from scripted import turn_lengths\n"
        "for seed in range(200): print(*turn_lengths(random.Random(seed), 5120))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    planned = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(planned) == 200 and all(len(turns) == 3 for turns in planned)
    totals = [sum(turns) for turns in planned]
    assert 2048 - 3 <= min(totals) < 2300 and 3900 < max(totals) <= 4096 + 3
    assert all(max(turns) <= 2.1 * min(turns) for turns in planned)


def test_a_summary_takes_the_rates_that_the_rows_have():
    row = {"timing_s/step": 2.0, "perf/total_num_tokens": 800.0, "tokens_per_s": 400.0, "perf/throughput": 100.0}
    row["memory_gib"] = 1.25
    script = (
        f"import sys, json; sys.path.insert(0, {str(PERF)!r})\n"
        f"from bench import summarize\nprint(json.dumps(summarize([{row!r}] * 3)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    rates = {"tokens_per_s": 400.0, "perf/throughput": 100.0}
    assert json.loads(done.stdout) == {**rates, "timing_s/step": 2.0, "memory_gib": 1.25}
