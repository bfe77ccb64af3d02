"""Soak test of the sandbox: runs many executions, some of them hostile, and checks for leaks.

    python perf/sandbox_soak.py                 # 50,000 executions, 5 % of them hostile
    python perf/sandbox_soak.py --count 2000

The first command takes about 15 minutes on 2 cores. Before and after the executions, the script
counts this process's children and open files, the sandbox's processes, mounts, cgroups and
temporary files. It also reports the memory of the supervisor and the zygotes. It exits with 1 if a
count grew, or if an execution was lost or had a wrong outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from retool_mcore.sandbox.base import ExecResult, Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox

ORDINARY = {
    "print({n})": "{n}\n",
    "sum(range({n}))": None,
    "import math\nmath.gcd({n}, 360)": None,
    "from fractions import Fraction as F\nF({n}, 7) + F(1, 3)": None,
    "import numpy as np\nprint(int(np.arange(10).sum()) + {n})": None,
    "import sympy as sp\nx = sp.Symbol('x')\nprint(sp.expand((x + {n})**2))": None,
    "undefined_{n}": None,
}
# code -> required (status, return code); None: any outcome is allowed
HOSTILE: dict[str, tuple[str, int | None] | None] = {
    "while True: pass": ("time_limit", None),
    "import time; time.sleep(60)": ("time_limit", None),
    "x = bytearray(2 << 30)": ("finished", 1),
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass": ("time_limit", None),
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: __import__('time').sleep(60)": (
        "finished",
        0,
    ),
    "while True: print('x' * 10000)": ("time_limit", None),
    "import os; os.kill(os.getppid(), 9); os.kill(-1, 9)": None,
    "import ctypes; ctypes.string_at(0)": ("finished", -11),
    "import os; os._exit(7)": ("finished", 7),
    "for i in range(5000): open(str(i), 'w').write('x')": None,
    "f = open('f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))": ("finished", 1),
    "import socket; socket.socket()": None,
    "import signal as s\nfor n in (1, 2, 15): s.signal(n, s.SIG_IGN)\nwhile 1: 1": ("time_limit", None),
    "import os\nwhile True: os.write(3, b'N' * 1000)": None,
    "(" * 3000: ("finished", 1),
    "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()": None,
}
RUN_TIMEOUT_S = 0.3
SEEN: set[str] = set()  # names of state directories, which are also names of cgroups


@dataclass(frozen=True)
class State:
    """Counts that must not grow."""

    fds: int
    children: int
    sandbox_processes: int
    mounts: int
    cgroups: int
    temporary_files: int


def observe() -> State:
    """Count what belongs to the sandboxes of this process and its descendants."""
    temporary, sandbox_processes = tempfile.gettempdir(), 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                sandbox_processes += f"HOME={temporary}/".encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
    children = [(task / "children").read_text().split() for task in Path("/proc/self/task").iterdir()]
    names = [path.name for path in Path(temporary).iterdir()]
    cgroups = sum(1 for name in {*names, *SEEN} for _ in Path("/sys/fs/cgroup").glob(f"**/{name}/*/"))
    SEEN.update(names)
    return State(
        fds=len(os.listdir("/proc/self/fd")),
        children=sum(map(len, children)),
        sandbox_processes=sandbox_processes,
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        cgroups=cgroups,
        temporary_files=sum(1 for _ in Path(temporary).rglob("*")),
    )


def memory_mb() -> dict[str, float]:
    """PSS (private memory and a share of shared memory) of this process and its zygotes, in MB."""

    def pss_mb(pid: int | str) -> float:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    pids = [int(p) for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()]
    inner = [int(p) for pid in pids for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return {"supervisor": round(pss_mb("self"), 1), "zygotes": round(sum(map(pss_mb, [*pids, *inner])), 1)}


async def settled_state() -> State:
    """The state once two observations a second apart agree."""
    state = observe()
    for _ in range(20):
        await asyncio.sleep(1)
        before, state = state, observe()
        if state == before:
            break
    return state


async def soak(count: int, hostile_share: float, level: Level, workers: int) -> dict[str, object]:
    """Run the executions and return a report."""
    rng = random.Random(0)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    async with LocalSandbox(min_level=level, max_level=level, workers=workers) as sandbox:

        async def run_program(number: int) -> None:
            hostile = rng.random() < hostile_share
            code = rng.choice(list(HOSTILE if hostile else ORDINARY))
            ends_by_itself = not hostile or (HOSTILE[code] or ("", 0))[0] == "finished"
            run_timeout_s = 30.0 if ends_by_itself else RUN_TIMEOUT_S
            source = code if hostile else code.replace("{n}", str(number))
            result = await sandbox.execute(source, run_timeout_s=run_timeout_s)
            outcomes[result.status] += 1
            if len(wrong) < 20 and (problem := judge(code, hostile, number, result)):
                wrong.append(problem)

        async def batch(numbers: range) -> None:
            remaining = iter(numbers)

            async def caller() -> None:
                for number in remaining:
                    await run_program(number)

            await asyncio.gather(*(caller() for _ in range(4 * workers)))

        warm_up = min(200, count)
        await batch(range(warm_up))
        gc.collect()
        before, memory_before, started = await settled_state(), memory_mb(), time.monotonic()
        step = max(1, count // 10)
        history: list[dict[str, float]] = []
        for first in range(0, count, step):
            await batch(range(first, min(first + step, count)))
            history.append(memory_mb())
            print(f"{first + step:6d} {time.monotonic() - started:7.1f} s  {history[-1]}  {dict(outcomes)}", flush=True)
        seconds = time.monotonic() - started
        gc.collect()
        after = await settled_state()
        report: dict[str, object] = {
            "level": str(sandbox.level),
            "executions": count,
            "seconds": round(seconds, 1),
            "per_second": round(count / seconds, 1),
            "outcomes": dict(outcomes),
            "lost": count + warm_up - sum(outcomes.values()),
            "wrong": wrong,
            "before": asdict(before),
            "after": asdict(after),
            "memory_mb_before": memory_before,
            "memory_mb_after": memory_mb(),
        }
    left = asdict(observe())
    of_sandbox = ("children", "sandbox_processes", "cgroups", "temporary_files")
    report["left_after_close"] = {name: left[name] for name in of_sandbox if left[name]}
    return report


def judge(code: str, hostile: bool, number: int, result: ExecResult) -> str | None:
    """Why the outcome is wrong, or None."""
    if hostile:
        expected = HOSTILE[code]
        if expected is None or (result.status, result.return_code) == expected:
            return None
        return f"{code[:40]!r}: {result.status} {result.return_code}, not {expected}: {result.stderr[-200:]}"
    failed = code.startswith("undefined")
    if result.status != "finished" or result.return_code != int(failed):
        return f"{code[:40]!r}: {result.status} {result.return_code} {result.stderr[-200:]}"
    if code == "print({n})" and result.stdout != f"{number}\n":
        return f"execution {number} got the output {result.stdout!r}"
    return None


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--hostile", type=float, default=0.05, help="share of hostile executions")
    parser.add_argument("--level", default="namespaces", choices=[*Level][1:])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        os.chmod(own, 0o711)
        tempfile.tempdir = own  # otherwise the counts would include other sandboxes on the machine
        report = asyncio.run(soak(options.count, options.hostile, Level(options.level), options.workers))
    print(json.dumps(report, indent=1))
    bad = report["before"] != report["after"] or report["lost"] or report["wrong"] or report["left_after_close"]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
