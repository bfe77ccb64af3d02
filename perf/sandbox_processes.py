r"""Measures what a second server process gives: one against two, in turns, on one machine.

    python perf/sandbox_processes.py --rounds 3

The clients are processes of their own, as the rollout workers of a run are. CPU per call is that of
the server's whole process tree. On a machine whose cores are all busy with one process already (two
cores: the server's on one, its executions and the clients on the other), two cannot be twice as
fast: `busy` is the share of one core that the busiest server process uses, which says whether the
process is the limit or the machine. The clients' own CPU is beside it: they may be the limit, too,
and with --server-cores they have the machine's other cores to themselves.
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
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from retool_mcore.process import die_with_parent
from retool_mcore.sandbox.client import RemoteSandbox

sys.path.insert(0, str(Path(__file__).parents[1]))
from perf.sandbox_bench import provenance, tree_cpu_s

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def client(url: str, count: int, concurrency: int) -> None:
    """``count`` print calls, between a line read after "ready" and "done"."""
    async with RemoteSandbox([url], workers_per_url=concurrency) as sandbox:
        await asyncio.gather(*(sandbox.execute("print(6 * 7)") for _ in range(concurrency)))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        results = await asyncio.gather(*(sandbox.execute("print(6 * 7)") for _ in range(count)))
        print("done", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    assert all(result.stdout == "42\n" for result in results), "a call failed"


def own_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / _TICKS_PER_S


class Peer:
    """A process that is spoken to in lines; killed when the block ends, or this process does."""

    def __init__(self, what: str, command: Sequence[str]) -> None:
        self.what = what
        end = partial(die_with_parent, signal.SIGTERM)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=end,  # noqa: PLW1509  before any thread
        )  # fmt: skip

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.communicate()

    def says(self) -> str:
        """Its next line. Exits with its status where there is none: it has said why on stderr."""
        line = self.process.stdout.readline().strip() if self.process.stdout is not None else ""
        if not line:
            raise SystemExit(f"error: {self.what} ended with status {self.process.wait()}; its words are above.")
        return line

    def go(self) -> None:
        assert self.process.stdin is not None, "asked for a pipe"
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def shares(calls: int, clients: int) -> list[int]:
    """Calls of each client; none is lost to division."""
    return [calls // clients + (number < calls % clients) for number in range(clients)]


def measure(processes: int, options: argparse.Namespace) -> dict[str, float]:
    """Calls per second with so many server processes, and what they and the clients cost."""
    serve = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", "0", "--min-level", options.level]
    serve += ["--workers", str(options.workers), "--processes", str(processes)]
    serve = ["taskset", "--cpu-list", options.server_cores, *serve] if options.server_cores else serve
    with ExitStack() as stack:
        server = stack.enter_context(Peer("the server", serve))
        own = [
            sys.executable,
            __file__,
            "--client",
            server.says(),
            "--concurrency",
            str(options.concurrency),
            "--calls",
        ]
        counts = shares(options.calls, options.clients)
        clients = [stack.enter_context(Peer("a client", [*own, str(count)])) for count in counts]
        for each in clients:
            each.says()
        root = server.process.pid
        servers = [int(pid) for pid in Path(f"/proc/{root}/task/{root}/children").read_text().split()]
        watched = [*servers, *(each.process.pid for each in clients)]
        before_s, tree_before_s = [own_cpu_s(pid) for pid in watched], tree_cpu_s(root)
        started = time.perf_counter()
        for each in clients:
            each.go()
        for each in clients:
            each.says()
        wall_s = time.perf_counter() - started
        used_s = [own_cpu_s(pid) - before for pid, before in zip(watched, before_s, strict=True)]
        of_servers, of_clients = used_s[: len(servers)], used_s[len(servers) :]
        tree_s, load = tree_cpu_s(root) - tree_before_s, os.getloadavg()[0]
        for each in clients:
            each.go()
        if any(each.process.wait() for each in clients):
            raise SystemExit("error: a client found a wrong answer; its words are above.")
        return {
            "per_s": options.calls / wall_s,
            "cpu_ms": tree_s / options.calls * 1e3,
            "server_ms": sum(of_servers) / options.calls * 1e3,
            "client_ms": sum(of_clients) / options.calls * 1e3,
            "busy": max(of_servers) / wall_s,
            "client_busy": max(of_clients) / wall_s,
            "load": load,
        }


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
    parser.add_argument("--server-cores", default="", help="all that the server and its executions get, such as 0-7")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        asyncio.run(client(options.client, options.calls, options.concurrency))
        return
    print(json.dumps(provenance(options.workers)))
    print("processes   calls/s   CPU ms   of the server's   busiest server   clients' ms   busiest client   load")
    found: dict[int, list[float]] = {}
    for _ in range(options.rounds):
        for processes in options.processes:
            row = measure(processes, options)
            found.setdefault(processes, []).append(row["per_s"])
            print(f"{processes:9d} {row['per_s']:9.1f} {row['cpu_ms']:8.2f} {row['server_ms']:17.2f} "
                  f"{row['busy']:14.0%} {row['client_ms']:13.2f} {row['client_busy']:16.0%} {row['load']:6.2f}",
                  flush=True)  # fmt: skip
    for processes, rates in found.items():
        print(f"{processes} processes: median {statistics.median(rates):.1f} calls/s")


if __name__ == "__main__":
    main()
