"""A measurement that is killed leaves no server behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HELD = """
import asyncio, sys
from perf.sandbox_bench import over_http
async def main():
    serve = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", "0", "--workers", "1"]
    async with over_http([*serve, "--min-level", "rlimits"]) as (sandbox, pid):
        asyncio.get_running_loop().call_later(1, print, pid)
        await asyncio.gather(*(sandbox.execute("import time; time.sleep(50)", run_timeout_s=60) for _ in range(8)))
asyncio.run(main())
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_a_benchmark_that_is_killed_takes_its_server_along(blow: signal.Signals):
    command = [sys.executable, "-u", "-c", HELD]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        assert Path(f"/proc/{server}").exists()
        bench.send_signal(blow)
    end_s = time.monotonic() + 300
    while Path(f"/proc/{server}").exists():
        assert time.monotonic() < end_s
        time.sleep(0.1)
