"""All rows of GSM8K with large numbers: numbers are found in processes, and each program is run.

Finding numbers is arithmetic in Python, 5 ms a row: for three draws of GSM8K two minutes in all.
"""

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from retool_mcore.data.build import ROWS_AT_ONCE, Builder
from retool_mcore.data.large import STAGES, variant
from retool_mcore.data.verify import Rejected, Stage, VerifiedRows
from retool_mcore.errors import DataError
from retool_mcore.process import die_with_parent
from retool_mcore.sandbox.base import Sandbox


def _begin() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the first one answers


def found_or_why(question: str, answer: str, seed: int) -> dict[str, str] | tuple[Stage, str]:
    """``variant``, or the stage and the reason of a reject: what a process can send."""
    try:
        return variant(question, answer, seed)
    except Rejected as rejected:
        return rejected.stage, rejected.reason


async def build_large(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    sandbox: Sandbox,
    on_row: Callable[[], None] = lambda: None,
    *,
    seed: int = 0,
    draws: int = 1,
) -> VerifiedRows:
    """Variants of all rows (where, {question, answer}), each run once as one program.

    Of ``draws`` seeds from ``seed`` on: first all rows with the first one's numbers, in order, then
    all with the next one's. Raises DataError when a row has another schema, or none survived.
    """
    builder = Builder(sandbox, "one", text=True)
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = VerifiedRows(STAGES)

    async def made(index: int, where: str, source: Mapping[str, Any], seed: int) -> dict[str, str] | Rejected:
        async with slots:
            on_row()
            question, answer = source.get("question"), source.get("answer")
            if not isinstance(question, str) or not isinstance(answer, str):
                raise DataError(f"{where}: GSM8K rows have the texts question and answer; here: {', '.join(source)}")
            row = await loop.run_in_executor(pool, found_or_why, question, answer, seed)
            if isinstance(row, tuple):
                return Rejected(*row)
            try:
                await builder.rows(where, index, row)
            except Rejected as rejected:
                return Rejected("execution", f"its program: {rejected}")
            return row

    wanted = [(*row, each) for each in range(seed, seed + draws) for row in rows]
    # spawned: a fork would hold what the sandbox has open
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(max(1, min(cores, len(rows))), context, initializer=_begin) as pool:
        results = await asyncio.gather(*(made(index, *each) for index, each in enumerate(wanted)))
    seen: set[str] = set()
    for (where, source, of_seed), result in zip(wanted, results, strict=True):
        if isinstance(result, Rejected):
            report.reject(where, result, source)
        elif result["question"] in seen:
            copy = Rejected("calculation", f"a copy: seed {of_seed} draws the numbers of an earlier one")
            report.reject(where, copy, source)
        else:
            seen.add(result["question"])
            report.rows.append(result)
    if not report.rows:
        raise DataError(f"none of {len(wanted)} problems survived; the first reject: {report.rejects[:1]}")
    return report


def reasons(report: VerifiedRows) -> list[str]:
    """How many rejects each reason has, the most frequent first."""
    counts = Counter(str(reject["reason"]).partition(":")[0] for reject in report.rejects)
    return [f"{count} rejected: {reason}" for reason, count in counts.most_common()]
