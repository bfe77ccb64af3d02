"""Decide whether an answer is equivalent to the truth.

Numbers and words are compared at once, values of expressions in checker processes. A checker has a
hard limit of CPU time and memory (see ``checker``), so no answer can hang or crash the caller. An
answer that is not shown to be equal within these limits is wrong.
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
from retool_mcore.reward.said import MAX_WORDS, choice, number_of, quick_verdict, said, words

__all__ = ["Checkers", "Verdict", "judge", "judge_many", "judgeable"]
DEFAULT_TIMEOUT_S: float = Reward.model_fields["timeout_s"].default
NUM_CHECKERS = 2  # per scoring process; verl runs `reward.workers` of them
NO_ANSWERS = frozenset((
    "proof", "prove", "proved", "proven", "see", "answers", "null", "nan", "omitted", "notfound",
))  # fmt: skip

How = Literal["exact", "values", "timeout", "crash", "too long"]


@dataclass(frozen=True)
class Verdict:
    """Whether two answers are equivalent, and how the check came to it.

    ``how`` is "exact" for a comparison of texts or numbers, "values" for one in a checker process.
    "timeout", "crash" and "too long" mean that the check was given up, and the answer counts as not
    equivalent.
    """

    equivalent: bool
    how: How


def judge(answer: str, truth: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Verdict:
    """Whether the answer equals the truth mathematically, and how that was found.

    Thread-safe. A check takes at most ``timeout_s`` of CPU time, however busy the machine is.
    Raises RewardError when no checker process can be started, but never because of the answer.
    """
    return _judge(_checkers(), answer, truth, timeout_s)


def judge_many(
    pairs: Iterable[tuple[str, str]], *, processes: int = NUM_CHECKERS, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Verdict]:
    """The verdicts of (answer, truth) pairs, in their order; each is what ``judge`` says of it.

    Values are compared in at most ``processes`` processes at a time, which end with the call.
    ConfigError when ``processes`` is below 1; RewardError as with ``judge``.
    """
    if processes < 1:
        raise ConfigError(f"processes = {processes}: at least one must compare.")

    def judge_pair(pair: tuple[str, str]) -> Verdict:
        return _judge(checkers, *pair, timeout_s)

    # Some threads read answers while others wait for a process.
    with closing(Checkers(processes)) as checkers, ThreadPoolExecutor(2 * processes) as pool:
        return list(pool.map(judge_pair, pairs))


def judgeable(truth: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str | None:
    """Why answers cannot be judged against the truth of a data row; None where they can.

    A truth is a number, mathematics, a choice or a few words, or a JSON list of such texts, each of
    which is accepted. Thread-safe. Raises RewardError like ``judge``.
    """
    return next(filter(None, (_problem(each, timeout_s) for each in accepted_truths(truth))), None)


def accepted_truths(truth: str) -> list[str]:
    """The truths in a JSON list of texts, such as ``["10", "ten"]``; else the text itself."""
    if truth.lstrip().startswith('["'):
        with suppress(ValueError):
            truths: object = json.loads(truth)
            if isinstance(truths, list) and all(isinstance(each, str) for each in cast("list[object]", truths)):
                return cast("list[str]", truths)
    return [truth]


def _problem(truth: str, timeout_s: float) -> str | None:
    if len(truth) > MAX_ANSWER_CHARS:
        return f"it has {len(truth)} characters; {MAX_ANSWER_CHARS} are the most"
    text = said(truth).text
    if not text:
        return "it is empty"
    if number_of(truth) is not None or choice(text) is not None:
        return None
    if spoken := (words(text) or "").split():
        if len(spoken) > MAX_WORDS:
            return f"it is a text of {len(spoken)} words, and only the same words would equal it"
        return f"{truth.strip()!r} is no answer" if spoken[0] in NO_ANSWERS else None
    reply = _checkers().ask({"truth": truth, "timeout_s": timeout_s})
    return "it takes too long to read" if "failed" in reply else reply["problem"] or None


def _judge(checkers: Checkers, answer: str, truth: str, timeout_s: float) -> Verdict:
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "too long")
    verdict = Verdict(False, "exact")
    for each in accepted_truths(truth):
        if (known := quick_verdict(answer, each)) is not None:
            verdict = Verdict(known, "exact")
        else:
            reply = checkers.ask({"answer": answer, "truth": each, "timeout_s": timeout_s})
            verdict = Verdict(False, reply["failed"]) if "failed" in reply else Verdict(reply["equal"], "values")
        if verdict.equivalent:
            break
    return verdict


class Checkers:
    """A pool of ``count`` checker processes, started when needed and replaced when they die."""

    def __init__(self, count: int) -> None:
        self._all = [_Checker() for _ in range(count)]
        self._idle: queue.LifoQueue[_Checker] = queue.LifoQueue()  # the one that was used last comes first
        for checker in self._all:
            self._idle.put(checker)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reply to one request: {"failed": "timeout" | "crash"} if its check was ended."""
        checker = self._idle.get()
        try:
            return checker.ask(request)
        finally:
            self._idle.put(checker)

    def close(self) -> None:
        for checker in self._all:
            checker.close()


class _Checker:
    """One checker process, which starts with the first request after ``close``."""

    process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.process = self.process or _started()
            line = _said(self.process, json.dumps(request).encode() + b"\n")
        except BaseException:
            self.close()  # or the next request would get this one's reply
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


def _said(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """A checker's reply; b"" if it died. The kernel ends a check that takes long."""
    assert process.stdin is not None and process.stdout is not None, "pipes were asked for"
    with suppress(BrokenPipeError):  # it died while idle
        process.stdin.write(request)
        process.stdin.flush()
    return process.stdout.readline()


def _started() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "retool_mcore.reward.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # killpg ends its forks too; Ctrl-C ends us, and its closed pipe then ends it
        )
    except OSError as error:
        raise RewardError(f"no process for answer checks can be started: {error}") from error
    if not _said(process, b""):
        raise RewardError(
            f"the process for answer checks did not start (exit code {process.wait()}). Try `{sys.executable} -m "
            "retool_mcore.reward.checker`: are sympy and latex2sympy2_extended installed, is there memory?"
        )
    return process


_lock = threading.Lock()


def _checkers() -> Checkers:
    """This process's checkers. A forked child gets its own, or the two would mix up replies."""
    with _lock:
        return _checkers_of(os.getpid())


@lru_cache(maxsize=1)
def _checkers_of(pid: int) -> Checkers:
    checkers = Checkers(NUM_CHECKERS)
    atexit.register(checkers.close)
    return checkers
