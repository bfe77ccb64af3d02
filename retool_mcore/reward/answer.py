"""Decides whether an answer is equivalent to the truth.

The caller's process compares numbers and words. Checker processes compare expressions. A checker
has hard limits of CPU time and memory (see ``checker``), so no answer can hang or crash the caller.
An answer that the judge cannot prove equal within these limits is wrong.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from retool_mcore.config.rl import Reward
from retool_mcore.errors import ConfigError, RewardError
from retool_mcore.reward.clean import MAX_ANSWER_CHARS
from retool_mcore.reward.statement import MAX_WORDS, choice, number_of, quick_verdict, statement_of, words

__all__ = ["CheckerPool", "Verdict", "judge", "judge_many", "truth_problem"]
DEFAULT_TIMEOUT_S: float = Reward.model_fields["timeout_s"].default
NUM_CHECKERS = 2  # per scoring process; verl starts `reward.workers` scoring processes
NON_ANSWERS = frozenset((
    "proof", "prove", "proved", "proven", "see", "answers", "null", "nan", "omitted", "notfound",
))  # fmt: skip

How = Literal["exact", "values", "timeout", "crash", "too long"]


@dataclass(frozen=True)
class Verdict:
    """Whether two answers are equivalent, and how the judge decided.

    ``how`` is "exact" if the judge compared texts or numbers, and "values" if a checker process
    compared expressions. "timeout" and "crash" mean that the check did not finish, and
    "too long" that an answer has too many characters to be checked; the answer then counts as not
    equivalent.
    """

    equivalent: bool
    how: How


def judge(answer: str, truth: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Verdict:
    """Compare an answer with the truth mathematically.

    Thread-safe. ``timeout_s`` limits the CPU time of the check, so a busy machine does not change
    the verdict. Raises RewardError if no checker process starts, never because of the answer.
    """
    return _judge(_pool(), answer, truth, timeout_s)


def judge_many(
    pairs: Iterable[tuple[str, str]], *, processes: int = NUM_CHECKERS, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Verdict]:
    """Judge (answer, truth) pairs like ``judge``, and return the verdicts in the same order.

    At most ``processes`` checker processes run at a time; they end before this returns. Raises
    ConfigError if ``processes`` is below 1, and RewardError like ``judge``.
    """
    if processes < 1:
        raise ConfigError(f"processes = {processes} is too small. Use at least 1.")

    def judge_pair(pair: tuple[str, str]) -> Verdict:
        return _judge(checkers, *pair, timeout_s)

    # Twice as many threads as processes: some parse answers while others wait for a checker.
    with closing(CheckerPool(processes)) as checkers, ThreadPoolExecutor(2 * processes) as pool:
        return list(pool.map(judge_pair, pairs))


def truth_problem(truth: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str | None:
    """Return why the judge cannot use a data row's truth, or None if it can.

    A truth is a number, an expression, a choice or a few words. It may also be a JSON list of such
    texts, each of which is accepted. Thread-safe. Raises RewardError like ``judge``.
    """
    return next(filter(None, (_problem(each, timeout_s) for each in accepted_truths(truth))), None)


def accepted_truths(truth: str) -> list[str]:
    """The texts in a JSON list such as ``["10", "ten"]``; any other text is the only truth."""
    if truth.lstrip().startswith('["'):
        with suppress(ValueError):
            truths: object = json.loads(truth)
            if isinstance(truths, list) and all(isinstance(each, str) for each in cast("list[object]", truths)):
                return cast("list[str]", truths)
    return [truth]


def _problem(truth: str, timeout_s: float) -> str | None:
    if len(truth) > MAX_ANSWER_CHARS:
        return f"it has {len(truth)} characters, but at most {MAX_ANSWER_CHARS} are allowed"
    text = statement_of(truth).text
    if not text:
        return "it is empty"
    if number_of(truth) is not None or choice(text) is not None:
        return None
    if truth_words := (words(text) or "").split():
        if len(truth_words) > MAX_WORDS:
            return f"it is a text of {len(truth_words)} words, which only the same words would match"
        return f"{truth.strip()!r} is not an answer" if truth_words[0] in NON_ANSWERS else None
    reply = _pool().ask({"truth": truth, "timeout_s": timeout_s})
    return "parsing it takes too long" if "failed" in reply else reply["problem"] or None


def _judge(pool: CheckerPool, answer: str, truth: str, timeout_s: float) -> Verdict:
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "too long")
    verdict = Verdict(False, "exact")
    for each in accepted_truths(truth):
        if (known := quick_verdict(answer, each)) is not None:
            verdict = Verdict(known, "exact")
        else:
            reply = pool.ask({"answer": answer, "truth": each, "timeout_s": timeout_s})
            verdict = Verdict(False, reply["failed"]) if "failed" in reply else Verdict(reply["equal"], "values")
        if verdict.equivalent:
            break
    return verdict


class CheckerPool:
    """``count`` checker processes. The pool starts them on demand and replaces dead ones."""

    def __init__(self, count: int) -> None:
        self._all = [_Checker() for _ in range(count)]
        self._idle: queue.LifoQueue[_Checker] = queue.LifoQueue()  # most recently used first
        for checker in self._all:
            self._idle.put(checker)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request to an idle checker and return its reply.

        The reply is {"failed": "timeout" | "crash"} if the check did not finish.
        """
        checker = self._idle.get()
        try:
            return checker.ask(request)
        finally:
            self._idle.put(checker)

    def close(self) -> None:
        for checker in self._all:
            checker.close()


class _Checker:
    """One checker process. The first request after ``close`` starts it again."""

    process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.process = self.process or _start_checker()
            line = _exchange(self.process, json.dumps(request).encode() + b"\n")
        except BaseException:
            self.close()  # otherwise the next request would read this one's reply
            raise
        if not line:
            self.close()
        return json.loads(line or '{"failed": "crash"}')

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Send a request and return the checker's reply, or b"" if it died.

    No timeout is needed: the kernel kills a checker that exceeds its CPU limit.
    """
    assert process.stdin is not None and process.stdout is not None, "Popen was called with pipes"
    with suppress(BrokenPipeError):  # the checker died while idle
        process.stdin.write(request)
        process.stdin.flush()
    return process.stdout.readline()


def _start_checker() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "retool_mcore.reward.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # killpg also kills its forks; after Ctrl-C it exits because we close its pipe
        )
    except OSError as error:
        raise RewardError(f"cannot start a process for answer checks: {error}") from error
    if not _exchange(process, b""):
        raise RewardError(
            f"the process for answer checks did not start (exit code {process.wait()}). Check that sympy and "
            "latex2sympy2_extended are installed and that memory is free. To see the error, run "
            f"`{sys.executable} -m retool_mcore.reward.checker`."
        )
    return process


_lock = threading.Lock()


def _pool() -> CheckerPool:
    """This process's checkers. A forked child gets its own; otherwise replies would mix."""
    with _lock:
        return _pool_of(os.getpid())


@lru_cache(maxsize=1)
def _pool_of(pid: int) -> CheckerPool:
    checkers = CheckerPool(NUM_CHECKERS)
    atexit.register(checkers.close)
    return checkers
