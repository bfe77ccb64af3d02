"""How many responses per second the reward judges: `python perf/reward_bench.py`; prints JSON.

Cases, each with half of the answers wrong:

- aime: integers as AIME asks for, in a response of 2,000 characters; the fast path.
- symbolic: twelve kinds of answers that are not plain numbers, every row with a truth of its own.
- symbolic_groups: the same, with 16 responses per truth, as in RL.

Responses go through compute_score from as many threads as `retool score` uses. ``cpu_ms`` is the
CPU time of this process and its checkers per row; it tells more than the rate where other jobs
share the machine. ``misjudged`` must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from retool_mcore.config.rl import Reward
from retool_mcore.reward.answer import NUM_CHECKERS
from retool_mcore.reward.score import compute_score

GROUP = 16
REWARD = Reward(timeout_s=30.0)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Write = Callable[[int, int, int], tuple[str, str]]  # three numbers -> two ways to write one value
KINDS: dict[str, Write] = {
    "root": lambda a, b, c: (rf"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}", rf"\frac{{{a}}}{{{c}}}\sqrt{{{b}}}"),
    "pi": lambda a, b, c: (rf"{a}\pi+{b}", rf"{b}+{a}\pi"),
    "polynomial": lambda a, b, c: (f"(x+{a})(x-{b})", f"x^2{a - b:+d}x-{a * b}"),
    "power": lambda a, b, c: (rf"2^{{{a}}}\cdot {b}", rf"{b}\cdot 2^{{{a}}}"),
    "tuple": lambda a, b, c: (rf"\left(\sqrt{{{a}}}, {b}\right)", rf"(\sqrt{{{a}}},{b})"),
    "interval": lambda a, b, c: (rf"\left[\frac{{{a}}}{{{b}}}, \infty\right)", rf"[{a}/{b},\infty)"),
    "set": lambda a, b, c: (rf"\{{{a}\sqrt2, {b}\}}", rf"\{{{b}, {a}\sqrt{{2}}\}}"),
    "logarithm": lambda a, b, c: (rf"\log_{{{a + 1}}} {b}", rf"\frac{{\ln {b}}}{{\ln {a + 1}}}"),
    "matrix": lambda a, b, c: (
        rf"\begin{{pmatrix}}{a}&{b}\\{c}&1\end{{pmatrix}}",
        rf"\begin{{bmatrix}}{a} & {b} \\ {c} & 1\end{{bmatrix}}",
    ),
    "complex": lambda a, b, c: (f"{a}+{b}i", f"{b}i+{a}"),
    "line": lambda a, b, c: (f"y={a}x+{b}", f"y = {b}+{a}x"),
    "binomial": lambda a, b, c: (rf"\binom{{{a + 10}}}{{2}}", rf"\frac{{({a + 10})({a + 9})}}{{2}}"),
}


Row = tuple[str, str, bool]  # response, truth, is it right


def aime(count: int, draw: random.Random) -> Iterator[Row]:
    """A three-digit number at the end of two thousand characters."""
    thinking = "Let us compute the remainder step by step, and check it. " * 35
    for _ in range(count):
        truth = draw.randrange(1000)
        answer = truth if draw.random() < 0.5 else draw.randrange(1000)
        yield f"{thinking}\nThe answer is \\boxed{{{answer:03d}}}.", str(truth), answer == truth


def symbolic(count: int, draw: random.Random, group: int = 1) -> Iterator[Row]:
    writers = list(KINDS.values())
    for number in range(count // group):
        a, b, c = (draw.randint(2, 99) for _ in range(3))
        write = writers[number % len(writers)]
        right, wrong, truth = write(a, b, c)[0], write(a + 1, b, c)[0], write(a, b, c)[1]
        for _ in range(group):
            answer = right if draw.random() < 0.5 else wrong
            yield f"So it is \\boxed{{{answer}}}.", truth, answer == right


def tree_cpu_s() -> float:
    """User and system time of this process, its living children and all that they have reaped."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return total / _TICKS_PER_S


def measure(rows: list[Row]) -> dict[str, float]:
    def judge(row: Row) -> dict[str, float]:
        return compute_score("bench", row[0], row[1], reward=REWARD)

    with ThreadPoolExecutor(2 * NUM_CHECKERS) as pool:
        list(pool.map(judge, rows[:: max(1, len(rows) // 32)]))  # starts the checkers
        cpu_s, started = tree_cpu_s(), time.perf_counter()
        results = list(pool.map(judge, rows))
        wall_s = time.perf_counter() - started
    return {
        "rows": len(rows),
        "rows_per_s": round(len(rows) / wall_s, 1),
        "cpu_ms": round((tree_cpu_s() - cpu_s) * 1e3 / len(rows), 3),
        "misjudged": sum(bool(result["acc"]) != row[2] for row, result in zip(rows, results, strict=True)),
        "given_up": sum(result["check_failed"] for result in results),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2400, help="symbolic rows; ten times as many AIME-like ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    cases = {
        "aime": list(aime(10 * options.rows, draw)),
        "symbolic": list(symbolic(options.rows, draw)),
        "symbolic_groups": list(symbolic(options.rows, draw, GROUP)),
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    facts = {"commit": commit, "python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}
    load = {"load_1min": os.getloadavg()[0]}
    print(json.dumps({**facts, **load, "cases": {name: measure(rows) for name, rows in cases.items()}}, indent=1))


if __name__ == "__main__":
    main()
