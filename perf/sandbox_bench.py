r"""Measures the speed of our sandbox and of SandboxFusion-compatible servers on one machine.

    python perf/sandbox_bench.py            # ours, in process and over HTTP
    python perf/sandbox_bench.py --peer sandboxfusion=http://127.0.0.1:8080 \
        --peer-pid sandboxfusion=4711
    python perf/sandbox_bench.py --imports pandas --python /opt/sandbox/bin/python
        # calls that import pandas, without and with sandbox.preload

CPU per execution is the CPU time of the server's process tree divided by the number of executions.
For the in-process sandbox, the tree is this process and its children. Run it on a quiet machine:
the record includes the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from bench import git

from retool_mcore.process import die_with_parent
from retool_mcore.sandbox.base import Level, Sandbox
from retool_mcore.sandbox.client import RemoteSandbox
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.local import LocalSandbox

CASES = {
    "print": ("print(6 * 7)", "42\n"),
    "numpy": ("import numpy as np\nprint(int(np.linalg.det(np.eye(3) * 2)))", "7\n"),
    "sympy": ("import sympy as sp\nx = sp.Symbol('x')\nprint(sp.expand((x + 1)**2))", "x**2 + 2*x + 1\n"),
    "solve": ("import sympy as sp\nx = sp.Symbol('x')\nprint(sp.solve(x**2 - 5*x + 6, x))", "[2, 3]\n"),
}
MEMORY_LIMIT_MB = 4096  # with less, OpenBLAS cannot start its threads in SandboxFusion
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One case on one server. Times in ms, throughput in executions per second."""

    server: str
    case: str
    cpu_ms: float | None
    p50_ms: float
    p95_ms: float
    per_s_at_32: float
    per_s_at_128: float
    num_errors: int


# -------------------------------------------------------------------- CPU time


def tree_cpu_s(root: int) -> float:
    """User and system time of a process, its live descendants, and processes that they reaped."""
    total_ticks = 0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has exited, and its parent counts its time
        total_ticks += sum(map(int, fields[11:15]))
    return total_ticks / _TICKS_PER_S


# ------------------------------------------------------------------ measuring


@dataclass
class Subject:
    """One case on one server."""

    sandbox: Sandbox
    code: str
    expected: str
    num_errors: int = 0

    async def execute(self) -> float:
        """Execute once; returns milliseconds."""
        started = time.perf_counter()
        result = await self.sandbox.execute(self.code, run_timeout_s=60, memory_limit_mb=MEMORY_LIMIT_MB)
        self.num_errors += result.stdout != self.expected
        return (time.perf_counter() - started) * 1e3

    async def latencies_ms(self, count: int) -> list[float]:
        """Execute ``count`` times in sequence; returns the milliseconds in ascending order."""
        for _ in range(5):
            await self.execute()
        return sorted([await self.execute() for _ in range(count)])

    async def per_s(self, count: int, concurrency: int) -> float:
        slots = asyncio.Semaphore(concurrency)

        async def bounded() -> None:
            async with slots:
                await self.execute()

        started = time.perf_counter()
        await asyncio.gather(*(bounded() for _ in range(count)))
        return count / (time.perf_counter() - started)


async def measure(
    name: str,
    sandbox: Sandbox,
    pid: int | None,
    counts: dict[str, tuple[int, int]],
    cases: dict[str, tuple[str, str]] = CASES,
) -> list[Row]:
    """Measure all cases on one server. ``cases``: name -> (code, expected output).

    ``counts``: name -> (number of executions in sequence, number at each concurrency). Measures the
    latencies of all cases first, because the kernel needs seconds after a burst to remove
    namespaces.
    """
    subjects = {case: Subject(sandbox, code, expected) for case, (code, expected) in cases.items()}
    latencies_ms = {case: await subject.latencies_ms(counts[case][0]) for case, subject in subjects.items()}
    rows: list[Row] = []
    for case, subject in subjects.items():
        burst = counts[case][1]
        cpu_before_s = tree_cpu_s(pid) if pid else 0.0
        at_32, at_128 = await subject.per_s(burst, 32), await subject.per_s(burst, 128)
        cpu_ms = (tree_cpu_s(pid) - cpu_before_s) * 1e3 / (2 * burst) if pid else None
        times_ms = latencies_ms[case]
        p50_ms, p95_ms = statistics.median(times_ms), times_ms[int(len(times_ms) * 0.95)]
        rows.append(Row(name, case, cpu_ms, p50_ms, p95_ms, at_32, at_128, subject.num_errors))
        print(table(rows[-1:]).splitlines()[1], flush=True)
    return rows


@asynccontextmanager
async def in_process(
    level: Level, workers: int, interpreter: Interpreter | None = None
) -> AsyncIterator[tuple[Sandbox, int | None]]:
    opened = LocalSandbox(min_level=level, max_level=level, workers=workers, interpreter=interpreter)
    async with opened as sandbox:
        yield sandbox, os.getpid()


@asynccontextmanager
async def over_http(command: list[str]) -> AsyncIterator[tuple[Sandbox, int | None]]:
    """Start our server. Its first line of output is its URL."""
    end = partial(die_with_parent, signal.SIGTERM)  # even if this process is killed
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end)  # noqa: PLW1509
    assert server.stdout is not None, "Popen was called with a pipe"
    try:
        url = (await asyncio.to_thread(server.stdout.readline)).strip()
        async with RemoteSandbox([url], workers_per_url=256) as sandbox:
            yield sandbox, server.pid
    finally:
        server.terminate()
        server.wait()


@asynccontextmanager
async def peer(url: str, pid: int | None) -> AsyncIterator[tuple[Sandbox, int | None]]:
    async with RemoteSandbox([url], workers_per_url=256) as sandbox:
        yield sandbox, pid


# -------------------------------------------------------------------- command


def provenance(workers: int) -> dict[str, object]:
    """Commit, machine and settings of the measurement."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "dirty": git("status", "--porcelain", "--", "retool_mcore/sandbox", "perf") != "",
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
        "workers": workers,
    }


def table(rows: list[Row]) -> str:
    lines = ["server                     case    CPU ms   p50 ms   p95 ms   /s @32  /s @128  errors"]
    for row in rows:
        cpu = f"{row.cpu_ms:8.1f}" if row.cpu_ms is not None else "       -"
        lines.append(
            f"{row.server:26} {row.case:6}{cpu} {row.p50_ms:8.1f} {row.p95_ms:8.1f} "
            f"{row.per_s_at_32:8.1f} {row.per_s_at_128:8.1f} {row.num_errors:7d}"
        )
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> list[Row]:
    level, serve = Level(options.level), [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", "0"]
    workers = ["--workers", str(options.workers)]
    pids = dict(pair.split("=", 1) for pair in options.peer_pid)
    subjects: list[tuple[str, Callable[[], object]]] = [
        (f"ours in process, {level}", lambda: in_process(level, options.workers)),
        ("ours over HTTP", lambda: over_http([*serve, *workers, "--min-level", level])),
    ]
    for name, url in (pair.split("=", 1) for pair in options.peer):
        pid = int(pids[name]) if name in pids else None
        subjects.append((name, lambda url=url, pid=pid: peer(url, pid)))
    rows: list[Row] = []
    for name, opened in subjects:
        foreign = not name.startswith("ours")
        async with opened() as (sandbox, pid):  # type: ignore[attr-defined]
            counts = {case: (20, 192 if case == "print" else 48) if foreign else (100, 600) for case in CASES}
            rows += await measure(name, sandbox, pid, counts)
    return rows


async def run_imports(options: argparse.Namespace) -> list[Row]:
    """Measure calls that import a module, without and with the module in sandbox.preload."""
    cases = {name: (f"import {name}\nprint(6 * 7)", "42\n") for name in options.imports}
    rows: list[Row] = []
    for label, preload in (("not preloaded", ()), ("in sandbox.preload", tuple(cases))):
        interpreter = Interpreter(options.python, preload)
        async with in_process(Level(options.level), options.workers, interpreter) as (sandbox, pid):
            rows += await measure(label, sandbox, pid, dict.fromkeys(cases, (20, 40)), cases)
    return rows


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="namespaces", choices=[*Level][1:])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="also measure this server")
    parser.add_argument("--peer-pid", action="append", default=[], metavar="NAME=PID", help="measure its CPU time, too")
    parser.add_argument("--imports", action="append", default=[], metavar="MODULE", help="measure calls that import it")
    parser.add_argument("--python", default="", help="for --imports: the interpreter that runs the code")
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args()
    facts = provenance(options.workers)
    print(json.dumps(facts))
    rows = asyncio.run(run_imports(options) if options.imports else run(options))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
