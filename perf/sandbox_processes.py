r"""Measures what a second server process gives: one against two, in turns, on one machine.

    python perf/sandbox_processes.py --rounds 3

The clients are processes of their own, as the rollout workers of a run are. CPU per call is that of
the server's whole process tree. On a machine whose cores are all busy with one process already (two
cores: the server's on one, its executions and the clients on the other), two cannot be twice as
fast: `busy` is the share of one core that the busiest server process uses, which says whether the
process is the limit or the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from retool_mcore.process import die_with_parent
from retool_mcore.sandbox.client import RemoteSandbox

sys.path.insert(0, str(Path(__file__).parents[1]))
from perf.sandbox_bench import provenance, tree_cpu_s

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def client(url: str, count: int, concurrency: int) -> None:
    """``count`` print calls, after "ready" was told and a line was read."""
    async with RemoteSandbox([url], workers_per_url=concurrency) as sandbox:
        await asyncio.gather(*(sandbox.execute("print(6 * 7)") for _ in range(concurrency)))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        results = await asyncio.gather(*(sandbox.execute("print(6 * 7)") for _ in range(count)))
    assert all(result.stdout == "42\n" for result in results), "a call failed"


def own_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / _TICKS_PER_S


def measure(processes: int, options: argparse.Namespace) -> dict[str, float]:
    """Calls per second with so many server processes, and what they cost."""
    end = partial(die_with_parent, signal.SIGTERM)
    serve = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", "0", "--min-level", options.level]
    serve += ["--workers", str(options.workers), "--processes", str(processes)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, preexec_fn=end) as server:  # noqa: PLW1509
        try:
            assert server.stdout is not None, "asked for a pipe"
            url = server.stdout.readline().strip()
            command = [sys.executable, __file__, "--client", url, "--calls", str(options.calls // options.clients)]
            command += ["--concurrency", str(options.concurrency)]
            clients = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=end)  # noqa: PLW1509
                for _ in range(options.clients)
            ]
            for one in clients:
                assert one.stdout is not None and one.stdout.readline() == "ready\n"
            tree = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            servers = [int(pid) for pid in tree.split()]
            before_s, cpu_before_s = [own_cpu_s(pid) for pid in servers], tree_cpu_s(server.pid)
            started = time.perf_counter()
            for one in clients:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
            assert [one.wait() for one in clients] == [0] * len(clients)
            wall_s = time.perf_counter() - started
            busy = [(own_cpu_s(pid) - before) / wall_s for pid, before in zip(servers, before_s, strict=True)]
            cpu_ms = (tree_cpu_s(server.pid) - cpu_before_s) / options.calls * 1e3
            return {"per_s": options.calls / wall_s, "cpu_ms": cpu_ms, "busy": max(busy), "server_ms":
                    sum(busy) * wall_s / options.calls * 1e3, "load": os.getloadavg()[0]}  # fmt: skip
        finally:
            server.terminate()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--level", default="namespaces")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(client(options.client, options.calls, options.concurrency))
        return
    print(json.dumps(provenance(options.workers)))
    print("processes   calls/s   CPU ms   of the server's   busiest server   load")
    found: dict[int, list[float]] = {}
    for _ in range(options.rounds):
        for processes in options.processes:
            row = measure(processes, options)
            found.setdefault(processes, []).append(row["per_s"])
            print(f"{processes:9d} {row['per_s']:9.1f} {row['cpu_ms']:8.2f} {row['server_ms']:17.2f} "
                  f"{row['busy']:14.0%} {row['load']:8.2f}", flush=True)  # fmt: skip
    for processes, rates in found.items():
        print(f"{processes} processes: median {statistics.median(rates):.1f} calls/s")


if __name__ == "__main__":
    main()
