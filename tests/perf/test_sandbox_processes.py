"""perf/sandbox_processes.py: every call counts, and a server that does not start ends it."""

import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from perf.sandbox_processes import shares

SCRIPT = Path(__file__).parents[2] / "perf" / "sandbox_processes.py"


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_no_call_is_lost_between_clients(calls: int, clients: int):
    found = shares(calls, clients)
    assert sum(found) == calls and len(found) == clients and max(found) - min(found) <= 1


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--rounds", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_server_that_does_not_start_is_one_error():
    found = run("--level", "airtight")
    assert found.returncode == 1
    assert "error: the server ended with status 2" in found.stderr and "airtight" in found.stderr
    assert "Traceback" not in found.stderr


def test_servers_and_clients_are_measured():
    found = run("--processes", "1", "--calls", "33", "--concurrency", "4", "--level", "rlimits")
    assert found.returncode == 0, found.stderr
    [row] = re.findall(r"^ +1 +(\S+) +(\S+) +(\S+) +(\S+)% +(\S+) +(\S+)%", found.stdout, re.MULTILINE)
    per_s, cpu_ms, server_ms, _, client_ms, _ = map(float, row)
    assert per_s > 1 and 0 < server_ms < cpu_ms
    assert client_ms > 0
