"""The process that asks math-verify: one JSON line in, one out, and never longer than its limit.

Run as ``python -m retool_mcore.reward.checker`` by ``answer.Checkers``. sympy can hang inside C code and eat all memory
on hostile LaTeX, so the limits are the kernel's: an alarm whose default action ends the process, and an address-space
limit. What they end is a fork of this process, so the next check finds sympy imported and warm.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_LIMIT_BYTES = 2 << 30
# sympy imports and caches on first use, which is not to count against the first answers' limits.
WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("y = 2x+1", "2x+1"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(1,2)", "(1, 3)"),
    ("[1,2)", "[1,2]"),
    ("1 < x < 2", "(1,2)"),
    ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{bmatrix}1&2\\end{bmatrix}"),
)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot read
    for answer, truth in WARM_UP:
        _judge(answer, truth)
    replies = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    _say(replies, {"ready": True})
    while True:
        child = os.fork()
        if child == 0:
            _serve(replies)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return  # our caller closed the pipe, or is gone
        _say(replies, {"failed": "timeout" if code == -signal.SIGALRM else "crash"})


def _serve(replies: int) -> None:
    """Answer requests until the pipe closes. Hanging or dying of one is the parent's to report."""
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        reply = _judge(request["answer"], request["truth"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(replies, reply)


def _say(replies: int, reply: dict[str, Any]) -> None:
    os.write(replies, json.dumps(reply).encode() + b"\n")


def _judge(answer: str, truth: str) -> dict[str, Any]:
    """{"equal", "truth_parses"}. Anything that math-verify or sympy raises means: not shown to be equal."""
    try:
        gold = _parse_truth(truth)
    except Exception:  # noqa: BLE001  sympy raises whatever it likes on hostile input
        gold = []
    try:
        equal = bool(gold) and _same_brackets(answer, truth) and _verify(gold, _parse(answer))
    except Exception:  # noqa: BLE001
        equal = False
    return {"equal": equal, "truth_parses": any(not isinstance(reading, str) for reading in gold)}


def _verify(gold: list[Any], target: list[Any]) -> bool:
    from math_verify import verify

    return verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None)


@lru_cache(maxsize=256)
def _parse_truth(truth: str) -> list[Any]:
    return _parse(truth)


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # A signal-based limit inside a limit would cancel ours.
    return parse(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=None)


def _same_brackets(answer: str, truth: str) -> bool:
    r"""False for a set against a tuple or interval: math-verify takes ``\{1,2\}`` for ``(1,2)``."""
    kinds = {_brackets(answer), _brackets(truth)}
    return not (len(kinds) == 2 and "set" in kinds and "tuple" in kinds)


def _brackets(text: str) -> str | None:
    text = re.sub(r"\\left|\\right|\s", "", text)
    if re.fullmatch(r"\\\{[^{}]*,.*\\\}", text):
        return "set"
    return "tuple" if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", text) else None


if __name__ == "__main__":
    main()
