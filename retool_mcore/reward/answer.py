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
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from retool_mcore.config.rl import Reward
from retool_mcore.errors import ConfigError, RewardError
from retool_mcore.reward.clean import MAX_ANSWER_CHARS
from retool_mcore.reward.said import MAX_WORDS, choice, number_of, quick_verdict, said, words

__all__ = ["Checkers", "Verdict", "is_equivalent", "judge", "judge_many", "judgeable"]
DEFAULT_TIMEOUT_S: float = Reward.model_fields["timeout_s"].default
NUM_CHECKERS = 2  # per scoring process; verl runs `reward.workers` of them
START_TIMEOUT_S = 120.0  # importing SymPy on a busy machine
NO_ANSWERS = frozenset((
    "proof", "prove", "proved", "proven", "see", "answers", "null", "nan", "omitted", "notfound",
))  # fmt: skip
# Wall time after which a checker is killed and replaced: so long that only a checker that waits for
# nothing gets there, not one on a busy machine.
GRACE_S, GRACE_FACTOR = 60.0, 20.0

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


def is_equivalent(answer: str, truth: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Whether the answer equals the truth mathematically.

    Examples: "034" and 34, 1/2 and 0.5, (x+1)^2 and x^2+2x+1.
    """
    return judge(answer, truth, timeout_s=timeout_s).equivalent


def judge(answer: str, truth: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Verdict:
    """Like ``is_equivalent``, but also says how the result was found.

    Thread-safe. A check takes at most ``timeout_s`` of CPU time, however busy the machine is.
    Raises RewardError when no checker process can be started, but never because of the answer.
    """
    return _judge(_checkers, answer, truth, timeout_s)


def judge_many(
    pairs: Iterable[tuple[str, str]], *, processes: int = NUM_CHECKERS, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Verdict]:
    """The verdicts of (answer, truth) pairs, in their order; each is what ``judge`` says of it.

    Values are compared in at most ``processes`` processes at a time, which end with the call.
    ConfigError when ``processes`` is below 1; RewardError as with ``judge``.
    """
    if processes < 1:
        raise ConfigError(f"processes = {processes}: at least one must compare.")
    checkers = Checkers(processes)

    def judge_pair(pair: tuple[str, str]) -> Verdict:
        return _judge(lambda: checkers, *pair, timeout_s)

    try:
        with ThreadPoolExecutor(2 * processes) as pool:  # some read answers while others wait for a process
            return list(pool.map(judge_pair, pairs))
    finally:
        checkers.close()


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


def _judge(checkers: Callable[[], Checkers], answer: str, truth: str, timeout_s: float) -> Verdict:
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "too long")
    verdict = Verdict(False, "exact")
    for each in accepted_truths(truth):
        known = quick_verdict(answer, each)
        if known is not None:
            verdict = Verdict(known, "exact")
        else:
            reply = checkers().ask({"answer": answer, "truth": each, "timeout_s": timeout_s})
            verdict = Verdict(False, reply["failed"]) if "failed" in reply else Verdict(reply["equal"], "values")
        if verdict.equivalent:
            break
    return verdict


class Checkers:
    """A pool of ``count`` checker processes, started when needed and replaced when they die."""

    def __init__(self, count: int) -> None:
        self._idle: queue.LifoQueue[_Checker | None] = queue.LifoQueue()
        self._all: set[_Checker] = set()
        for _ in range(count):
            self._idle.put(None)  # a slot whose process has not started yet

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reply to one request: {"failed": "timeout" | "crash"} if the checker hung or died."""
        checker = self._idle.get()
        try:
            if checker is None:
                checker = _Checker()
                self._all.add(checker)
            reply = checker.ask(request)
        except BaseException:
            self._discard(checker)
            self._idle.put(None)
            raise
        if checker.gone:
            self._discard(checker)
            checker = None
        self._idle.put(checker)
        return reply

    def close(self) -> None:
        for checker in list(self._all):
            self._discard(checker)

    def _discard(self, checker: _Checker | None) -> None:
        if checker is not None:
            checker.close()
            self._all.discard(checker)


class _Checker:
    """One checker process and its pipes."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "retool_mcore.reward.checker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # killpg ends its forks too; Ctrl-C ends us, and its closed pipe then ends it
            )
        except OSError as error:
            raise RewardError(f"no process for answer checks can be started: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        self._requests: IO[bytes] = self._process.stdin
        self._replies: IO[bytes] = self._process.stdout
        self.gone = False
        if "ready" not in self._read(START_TIMEOUT_S):
            self.close()
            raise RewardError(
                f"the process for answer checks did not start within {START_TIMEOUT_S:.0f} s (exit code "
                f"{self._process.returncode}). Try `{sys.executable} -m retool_mcore.reward.checker`: are sympy and "
                "latex2sympy2_extended installed, is there memory?"
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it died while idle: the read below reports it
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        return self._read(GRACE_S + GRACE_FACTOR * request["timeout_s"])

    def _read(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # not select(): a trainer has more than 1024 files open
        poll.register(self._replies, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            left_ms = (deadline - time.monotonic()) * 1000
            part = os.read(self._replies.fileno(), 65536) if left_ms > 0 and poll.poll(left_ms) else None
            if not part:
                self.gone = True
                return {"failed": "timeout" if part is None else "crash"}
            line += part
        return json.loads(line)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._replies.close()
        with suppress(BrokenPipeError):
            self._requests.close()


_lock = threading.Lock()
_shared: tuple[int, Checkers] | None = None


def _checkers() -> Checkers:
    """This process's checkers. A forked child gets its own, or the two would mix up replies."""
    global _shared  # noqa: PLW0603  one pool per process, behind a lock
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = (os.getpid(), Checkers(NUM_CHECKERS))
            atexit.register(_shared[1].close)
        return _shared[1]
