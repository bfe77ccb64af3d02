"""Ray's command for a worker: a fork of ``forked_workers``, for which this process stands.

Words: the socket, then the script of the worker and its words. It exits as the worker does, and its
death is the worker's. Where no process listens, or has not imported everything after half of the
time in which raylet waits for a worker, it becomes the usual Python with the same words.
It runs without site-packages, and imports the standard library only.
"""

import json
import os
import signal
import socket
import sys

WAIT_S = 30.0


def main(path: str, *words: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    answers = server.makefile()
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(request).encode() + b"\n"
    server.settimeout(WAIT_S)
    try:
        server.connect(path)
        server.sendall(text[socket.send_fds(server, [text], [0, 1, 2]) :])
        forked = answers.readline()
    except OSError:
        forked = ""
    if not forked:
        os.execv(sys.executable, [sys.executable, *words])
    server.settimeout(None)
    code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
