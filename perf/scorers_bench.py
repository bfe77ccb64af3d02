"""Our judge of answers beside other scorers: `python perf/scorers_bench.py`; prints a table.

Each pair is judged as one response, ``\\boxed{answer}``, against one truth. Three sources of pairs:

- listed: the tests' hard pairs, every way of an answer against every other (both directions), and
  pairs of different answers;
- generated: the tests' families of spellings, drawn anew from ``--seed``;
- ``--golds FILE``: JSON lines {"answer"}, such as the answers of a public test set. Each is judged
  against mechanical respellings of itself (equal), and against itself with one digit changed and
  another line's answer (unequal). A changed digit may leave the value as it was (1^2 and 1^3), so a
  few tenths of a percent there are no errors.

All three were in sight while our judge was written: answers of public test sets were read to see
what it could not read. Other golds say more than these.

Scorers: ours; math-verify as installed; verl's math_dapo, math_reward and prime_math. ``--grader
PATH`` adds, as "grader", the ``math_equal(prediction, reference)`` of a folder with a grader.py, as
Qwen2.5-Math has one. It needs antlr 4.11, which verl's imports do not bear: put it on PYTHONPATH
and measure ``--scorers grader`` alone. A scorer that raises has said "not
equal".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import logging
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from perf.reward_bench import tree_cpu_s
from retool_mcore.reward.score import compute_score
from tests.reward.generated import FAMILIES, pairs
from tests.reward.spellings import EQUAL, UNEQUAL

Pair = tuple[str, str, bool]  # answer, truth, equal
Judge = Callable[[str, str], bool]
_NUMBER = re.compile(r"-?[\d.]+")


def listed() -> Iterator[Pair]:
    for ways in EQUAL:
        yield from ((answer, truth, True) for answer, truth in itertools.permutations(ways, 2))
    for answer, truth in UNEQUAL:
        yield from ((answer, truth, False), (truth, answer, False))
    yield from ((a[0], b[0], False) for a, b in itertools.permutations(EQUAL, 2))


def generated(count: int, draw: random.Random) -> Iterator[Pair]:
    for index in range(count):
        yield from pairs(FAMILIES[index % len(FAMILIES)], draw)


def respelled(path: Path, draw: random.Random) -> Iterator[Pair]:
    """Pairs of the answers in a file that are more than a plain number."""
    answers = [str(json.loads(line)["answer"]) for line in path.read_text().splitlines()]
    answers = [answer for answer in answers if not _NUMBER.fullmatch(answer.strip())]
    for answer in answers:
        bare = answer.strip().removeprefix("$").removesuffix("$")
        for way in {
            bare.replace(r"\frac", r"\dfrac"),
            bare.replace(r"\left", "").replace(r"\right", ""),
            f"${bare}$",
            f"{bare}.",
            re.sub(r"(?<=[\w})])([+=])(?=[\w\\({])", r" \1 ", bare),
            bare.replace(r"\mathrm{~", r"\text{ "),
        } - {bare}:
            yield way, bare, True
        digits = [match.start() for match in re.finditer(r"\d", bare)]
        if digits:
            at = draw.choice(digits)
            other = str((int(bare[at]) + draw.randint(1, 8)) % 10)
            yield bare[:at] + other + bare[at + 1 :], bare, False
        stranger = draw.choice(answers)
        if re.sub(r"[\s$.]", "", stranger) != re.sub(r"[\s$.]", "", answer):
            yield stranger, bare, False


def ours(answer: str, truth: str) -> bool:
    return bool(compute_score("bench", f"\\boxed{{{answer}}}", truth)["acc"])


def math_verify(answer: str, truth: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{truth}}}"), parse(f"\\boxed{{{answer}}}")))


def verls(name: str) -> Judge:
    scorer: Any = importlib.import_module(f"verl.utils.reward_score.{name}")

    def judge(answer: str, truth: str) -> bool:
        result = scorer.compute_score(f"Answer: {answer}" if name == "math_dapo" else f"\\boxed{{{answer}}}", truth)
        if isinstance(result, dict):
            return bool(result["acc"])
        return bool(result[0] if isinstance(result, tuple) else result)

    return judge


def graders(folder: Path) -> Judge:
    sys.path.insert(0, str(folder))
    sys.path.insert(0, str(folder / "latex2sympy"))
    grader: Any = importlib.import_module("grader")
    return lambda answer, truth: bool(grader.math_equal(answer, truth, timeout=False))


def measure(judge: Judge, rows: list[Pair]) -> dict[str, Any]:
    verdicts: list[bool] = []
    with contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(Exception):
            judge("\\sqrt{8}", "2\\sqrt{2}")  # whatever it starts or imports at first
        started = tree_cpu_s()
        for answer, truth, _ in rows:
            try:
                verdicts.append(judge(answer, truth))
            except Exception:  # noqa: BLE001  as a trainer would have it: no reward
                verdicts.append(False)
        cpu_s = tree_cpu_s() - started
    wrong = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict != row[2]]
    equal = sum(row[2] for row in rows)
    return {
        "missed": sum(row[2] for row in wrong) / max(equal, 1),
        "passed": sum(not row[2] for row in wrong) / max(len(rows) - equal, 1),
        "rows_per_s": len(rows) / max(cpu_s, 0.01),
        "wrong": wrong,
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golds", type=Path, help='JSON lines {"answer"}')
    parser.add_argument("--grader", type=Path, help="folder with a grader.py that has math_equal")
    parser.add_argument("--scorers", nargs="*", help="only these rows of the table")
    parser.add_argument("--rows", type=int, default=500, help="at most so many pairs of each source")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print our wrong verdicts")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    draw = random.Random(options.seed)

    def some(rows: list[Pair], equal: bool) -> list[Pair]:
        known = [row for row in rows if row[2] == equal]
        return draw.sample(known, min(options.rows // 2, len(known)))

    sources = {"listed": list(listed()), "generated": list(generated(options.rows, draw))}
    if options.golds:
        sources["golds"] = list(respelled(options.golds, draw))
    sources = {name: [*some(rows, True), *some(rows, False)] for name, rows in sources.items()}
    # Made when their turn comes: a grader may need another antlr than verl's imports do.
    judges: dict[str, Callable[[], Judge]] = {"ours": lambda: ours, "math-verify": lambda: math_verify}
    judges |= {f"verl {name}": partial(verls, name) for name in ("math_dapo", "math_reward", "prime_math")}
    if options.grader:
        judges["grader"] = partial(graders, options.grader.resolve())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    counts = {name: (sum(row[2] for row in rows), len(rows)) for name, rows in sources.items()}
    said = ", ".join(f"{name} {equal} equal of {total}" for name, (equal, total) in counts.items())
    print(f"commit {commit.stdout.strip()}, seed {options.seed}; pairs: {said}\n")
    print(
        "| scorer | pairs | equal judged unequal | unequal judged equal | rows per CPU second |\n|---|---|---|---|---|"
    )
    for label, make in judges.items():
        if options.scorers and label not in options.scorers:
            continue
        judge = make()
        for source, rows in sources.items():
            got = measure(judge, rows)
            print(
                f"| {label} | {source} | {got['missed']:.2%} | {got['passed']:.2%} | {got['rows_per_s']:.0f} |",
                flush=True,
            )
            if options.show and label == "ours":
                print("\n".join(map(repr, got["wrong"])))


if __name__ == "__main__":
    main()
