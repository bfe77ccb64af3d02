"""Measures how many responses per second the judge scores: `python perf/reward_bench.py`.

Prints JSON. Half of the answers in each case are wrong:

- aime: AIME's integers, in responses of 2,000 characters; the fast path.
- symbolic: twelve kinds of answers that are not plain numbers, each row with a different truth.
- symbolic_groups: the same with 16 responses per truth, as in RL.

``--answers FILE`` (gzipped JSON lines: answer, truth, right, rows) measures answers of real models
instead, with our judge and with math-verify. ``lost`` counts right rows that a judge rejects, and
``passed`` wrong rows that it accepts. ``rows_per_cpu_s`` weights each pair by its ``rows``.
``--every 10`` uses every tenth pair.

Symbolic responses are judged in as many threads as in `retool score`, because a thread waits for
its checker process. AIME-like responses need no checker, so one thread judges them. ``cpu_ms`` is
the CPU time per row of this process and its checkers; on a shared machine, trust it more than the
rate. ``misjudged`` must be 0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import git
from math_verify import parse, verify
from sandbox_bench import tree_cpu_s

from retool_mcore.config.rl import Reward
from retool_mcore.reward.answer import NUM_CHECKERS
from retool_mcore.reward.forms import equivalent
from retool_mcore.reward.score import compute_score

GROUP = 16
REWARD = Reward(timeout_s=30.0)

Write = Callable[[int, int, int], tuple[str, str]]  # three numbers -> two spellings of one value
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


Row = tuple[str, str, bool]  # response, truth, whether the response is right


def aime(count: int, draw: random.Random) -> Iterator[Row]:
    """Responses of 2,000 characters that end in a three-digit number."""
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


def measure(rows: list[Row], threads: int) -> dict[str, float]:
    """Judge ``rows`` in one thread, or in several, each waiting for its own checker process."""

    def judge(row: Row) -> dict[str, float]:
        return compute_score("bench", row[0], row[1], reward=REWARD)

    with ThreadPoolExecutor(threads) as pool:
        apply = map if threads == 1 else pool.map
        list(apply(judge, rows[:: max(1, len(rows) // 32)]))  # starts the checkers
        cpu_s, started = tree_cpu_s(os.getpid()), time.perf_counter()
        results = list(apply(judge, rows))
        wall_s = time.perf_counter() - started
    return {
        "rows": len(rows),
        "rows_per_s": round(len(rows) / wall_s, 1),
        "cpu_ms": round((tree_cpu_s(os.getpid()) - cpu_s) * 1e3 / len(rows), 3),
        "misjudged": sum(bool(result["acc"]) != row[2] for row, result in zip(rows, results, strict=True)),
        "given_up": sum(result["check_failed"] for result in results),
    }


def math_verify(answer: str, truth: str) -> bool:
    gold, target = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    return verify(gold, target, timeout_seconds=None)


def measure_answers(pairs: list[dict[str, Any]], judge: Callable[[str, str], bool]) -> dict[str, float]:
    """Rows per CPU second of one process, and how often the judge differs from the file."""
    judge(r"\sqrt{8}", r"2\sqrt{2}")  # warm-up: imports and caches
    started = time.process_time()
    found = [judge(pair["answer"], pair["truth"]) for pair in pairs]
    cpu_s, rows = time.process_time() - started, sum(pair["rows"] for pair in pairs)
    right = sum(pair["rows"] for pair in pairs if pair["right"])
    lost = sum(pair["rows"] for pair, equal in zip(pairs, found, strict=True) if pair["right"] and not equal)
    passed = sum(pair["rows"] for pair, equal in zip(pairs, found, strict=True) if equal and not pair["right"])
    return {"rows": rows, "right": right, "lost": lost, "passed": passed, "rows_per_cpu_s": round(rows / cpu_s, 1)}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2400, help="symbolic rows; case aime has ten times as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="file with answers of real models")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="use every Nth pair of --answers")
    options = parser.parse_args()
    if options.answers:
        lines = gzip.decompress(options.answers.read_bytes()).splitlines()[:: options.every]
        pairs = [json.loads(line) for line in lines]
        judges = {"ours": equivalent, "math_verify": math_verify}
        print(json.dumps({name: measure_answers(pairs, judge) for name, judge in judges.items()}, indent=1))
        return
    draw = random.Random(options.seed)
    several = 2 * NUM_CHECKERS
    cases = {
        "aime": measure(list(aime(10 * options.rows, draw)), threads=1),
        "symbolic": measure(list(symbolic(options.rows, draw)), several),
        "symbolic_groups": measure(list(symbolic(options.rows, draw, GROUP)), several),
    }
    facts = {
        "commit": git("rev-parse", "HEAD"),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
    }
    print(json.dumps({**facts, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
