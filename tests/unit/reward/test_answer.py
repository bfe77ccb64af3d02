"""Equivalence: what is equal, what is not, and that no answer can hang or crash the caller."""

import os
import signal
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from retool_mcore.reward import answer
from retool_mcore.reward.answer import CheckerPool, Verdict, judge, judge_many, truth_problem
from tests.unit.reward.slow import SLOW

PARTS = tomllib.loads(Path(__file__).with_name("pieces.toml").read_text(encoding="utf-8"))
HOSTILE = ["".join(piece * times for piece, times in each) for each in PARTS["hostile"]]
HOSTILE.append("\x00\x01\ud800")


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_is_wrong_in_time(answer):
    judge(r"\ln 8", r"3\ln 2", timeout_s=60)  # the checker is running
    started = time.monotonic()
    verdict = judge(answer, r"\frac{355}{113}", timeout_s=0.3)
    assert not verdict.equivalent
    assert time.monotonic() - started < 5
    assert judge(r"\ln 9", r"2\ln 3", timeout_s=60).equivalent  # and the next answer is judged as ever


def test_a_hanging_check_times_out():
    assert judge(*SLOW, timeout_s=0.1).how == "timeout"
    assert judge(*SLOW, timeout_s=60) == Verdict(True, "values")


def children() -> set[int]:
    """Pids of this process's children."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread has ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def test_the_limit_counts_cpu_time_and_a_killed_checker_is_replaced():
    checkers = CheckerPool(count=1)
    before = children()
    assert checkers.ask({"answer": r"\ln 2", "truth": r"\ln 3", "timeout_s": 60.0}) == {"equal": False}
    (checker,) = children() - before
    request = {"answer": r"\ln 8", "truth": r"3\ln 2", "timeout_s": 0.5}
    with ThreadPoolExecutor(1) as pool:
        os.killpg(checker, signal.SIGSTOP)  # the machine gives it no time
        reply = pool.submit(checkers.ask, request)
        time.sleep(1.5)
        assert not reply.done()
        os.killpg(checker, signal.SIGCONT)
        assert reply.result(timeout=300) == {"equal": True}
    os.killpg(checker, signal.SIGKILL)
    os.waitid(os.P_PID, checker, os.WEXITED | os.WNOWAIT)
    assert checkers.ask(request) == {"failed": "crash"}
    assert checkers.ask(request | {"timeout_s": 60.0}) == {"equal": True}
    checkers.close()


def test_checks_from_many_threads_do_not_mix():
    pairs = [(rf"{n}\ln 8", rf"{3 * n + (n + 1) % 2}\ln 2") for n in range(1, 41)]
    with ThreadPoolExecutor(16) as pool:
        verdicts = list(pool.map(lambda pair: judge(*pair, timeout_s=60), pairs))
    assert [verdict.equivalent for verdict in verdicts] == [n % 2 == 1 for n in range(1, 41)]


def test_many_answers_are_judged_as_one_is_in_processes_that_end():
    pairs = [("034", "34"), (r"\ln 8", r"3\ln 2"), SLOW, (r"\ln 2", r"\ln 2.0001"), ("1+" * 500_000, "5")]
    before = children()
    verdicts = judge_many(pairs, processes=2, timeout_s=0.5)
    assert [(verdict.equivalent, verdict.how) for verdict in verdicts] == [
        (True, "exact"), (True, "values"), (False, "timeout"), (False, "values"), (False, "too long"),
    ]  # fmt: skip
    assert children() <= before


@pytest.mark.parametrize(("truth", "reason"), [*PARTS["refused_truths"], ("1+" * 1001 + "1", "2003 characters")])
def test_a_truth_that_cannot_be_judged_has_a_reason(truth, reason):
    assert reason in (truth_problem(truth) or "")


def test_a_checker_may_use_2_gib_and_no_more():
    """The kernel's own word of the processes that compare values."""
    assert judge(r"\ln 8", r"3\ln 2") == Verdict(True, "values")
    running = [checker.process for checker in answer._pool()._all if checker.process]
    limits = [Path(f"/proc/{process.pid}/limits").read_text() for process in running]
    assert limits
    for text in limits:
        line = next(line for line in text.splitlines() if line.startswith("Max address space"))
        assert line.split()[3:5] == ["2147483648", "2147483648"]
