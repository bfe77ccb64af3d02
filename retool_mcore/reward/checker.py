"""The process that compares values with SymPy: one JSON line in, one out, within a CPU limit.

``answer.Checkers`` runs it as ``python -m retool_mcore.reward.checker``. Arithmetic on a hostile
answer can hang inside C code and use up all memory, so the kernel sets the limits: a timer of CPU
time whose default action ends the process, and an address-space limit. CPU time, not wall time: a
busy machine must not change a verdict. They end a fork of this process, so the next check finds
everything imported and warm.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from retool_mcore.reward.forms import compared, unreadable

MEMORY_LIMIT_BYTES = 2 << 30
# SymPy and the LaTeX parser fill caches on first use, not within an answer's limit.
WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("y = 2x+1", "2x+1"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(1,x]\\cup[3,\\infty)", "(1, 3)"),
    ("2\\pi+3i", "\\pi-\\ln 2"),
    ("\\binom{5}{2}", "\\frac{5!}{2^3}"),
    ("\\log_{3} 4", "\\sin x"),
    ("1 < x < 2", "(1,2)"),
    ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{bmatrix}1&2\\end{bmatrix}"),
)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for answer, truth in WARM_UP:
        compared(answer, truth)
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
            return  # our caller closed the pipe or is gone
        _say(replies, {"failed": "timeout" if code == -signal.SIGPROF else "crash"})


def _serve(replies: int) -> None:
    """Answer requests until the pipe closes. The parent reports a request that hangs or dies."""
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        if "answer" in request:
            reply = {"equal": compared(request["answer"], request["truth"])}
        else:
            reply = {"problem": unreadable(request["truth"])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(replies, reply)


def _say(replies: int, reply: dict[str, Any]) -> None:
    os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
