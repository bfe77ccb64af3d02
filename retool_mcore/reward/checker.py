"""A process that compares expressions with SymPy: reads and writes JSON lines.

``answer.CheckerPool`` runs it as ``python -m retool_mcore.reward.checker``. Arithmetic on a hostile
answer can hang inside C code or use up all memory, so the kernel enforces the limits: a CPU timer,
whose signal kills the process, and an address-space limit. The timer counts CPU time, so that a
busy machine does not change a verdict. A fork runs the checks, so after a kill the next
fork starts with all modules imported and all caches warm.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from retool_mcore.reward.forms import equal_by_value, unreadable_reason

MEMORY_LIMIT_BYTES = 2 << 30
# SymPy and the LaTeX parser fill caches on first use, which must not count against an answer.
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
        equal_by_value(answer, truth)
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    _reply(replies, {"ready": True})
    while True:
        child = os.fork()
        if child == 0:
            _serve(replies)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return  # the caller closed the pipe or died
        _reply(replies, {"failed": "timeout" if code == -signal.SIGPROF else "crash"})


def _serve(replies: int) -> None:
    """Answer requests until the pipe closes. The parent reports a request that killed this fork."""
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        if "answer" in request:
            reply = {"equal": equal_by_value(request["answer"], request["truth"])}
        else:
            reply = {"problem": unreadable_reason(request["truth"])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(replies, reply)


def _reply(replies: int, reply: dict[str, Any]) -> None:
    os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
