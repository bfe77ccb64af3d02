"""Writes the table in retool_mcore/sandbox/README.md: each cell is the result of a real attack.

    python -m tests.sandbox.table     # as root: runs all attacks, writes the table

Every attack runs twice at every level: for a trainer that runs as root, whose executions have their
own uids, and for a trainer that runs as an ordinary user. The command fails if a level or user is
not available here. ``test_table.py`` compares the written table with the available ones.
"""

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import ExecResult, Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import LEVELS, NOT_REDIRECTED, named, processes_named

README = Path(__file__).resolve().parents[2] / "retool_mcore/sandbox/README.md"
START, END = "<!-- made by `python -m tests.sandbox.table` -->", "<!-- end of the table -->"
Outcome = Callable[[ExecResult], bool]


READY = "rt-ready"  # process name of a neighbour that has finished its preparation
_WAITS = named(READY) + "time.sleep(9)"
NEIGHBOUR = f"open('private', 'w').close()\n{_WAITS}"


def printed_refused(result: ExecResult) -> bool:
    return result.stdout.strip() == "refused"


@dataclass(frozen=True)
class Attack:
    """``code`` prints "refused" if it gained nothing. ``prevented``: whether the attack failed."""

    name: str
    code: str
    prevented: Outcome = printed_refused
    neighbour: str = NEIGHBOUR
    neighbour_s: float = 0.01
    options: dict[str, float] = field(default_factory=dict[str, float])


def attempts(*lines: str) -> str:
    """Return code that prints "refused" if every line raises OSError, otherwise "done"."""
    calls = "".join(f"attempt(lambda: {line})\n" for line in lines)
    return (
        "import ctypes, glob, os, signal, socket\ndone = []\ndef attempt(f):\n    try: f()\n"
        "    except OSError: return\n    done.append(1)\n" + calls + "print('done' if done else 'refused')"
    )


def attacks(host: Path, port: int) -> list[Attack]:
    """Return the table's rows. ``host`` has the trainer's files; a server listens on ``port``."""
    return [*_on_limits(host), *_on_neighbours(), *_on_the_host(host, port)]


def _on_limits(host: Path) -> list[Attack]:
    """Attacks on the limits of time, memory, processes and files."""

    def nobody_left(_: ExecResult) -> bool:
        time.sleep(1.3)
        return not (host / "survived").exists() and not processes_named("rt-survivor")

    survivor = (
        "import ctypes, os, signal, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  ctypes.CDLL(None).prctl(15, b'rt-survivor', 0, 0, 0)\n  {kill}  time.sleep(2)\n  os._exit(0)\n os._exit(0)\n"
        "time.sleep(0.3)"
    )
    kill = "above = {above}\n  for p in above:\n   try: os.kill(p, 9)\n   except OSError: pass\n"
    return [
        Attack(
            "endless loop with every signal ignored: killed at the time limit",
            "import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
            "while True: pass",
            lambda result: result.status == "time_limit",
            options={"run_timeout_s": 0.5},
        ),
        Attack(
            "memory of one process",
            "try: x = bytearray(900 << 20); print('done')\nexcept MemoryError: print('refused')",
            options={"memory_limit_mb": 256},
        ),
        Attack(
            "64 processes, 256 open files, 64 MiB per file",
            "import os, time\nopened, num = [], 0\ntry:\n for _ in range(300): opened.append(open('/dev/null'))\n"
            "except OSError: num += 1\nopened.clear()\ntry:\n"
            " with open('f', 'wb') as f:\n  for _ in range(100): f.write(bytes(1 << 20))\n"
            "except OSError: num += 1\ntry:\n"
            " for _ in range(200):\n  if os.fork() == 0: time.sleep(9)\nexcept OSError: num += 1\n"
            "print('refused' if num == 3 else num)",
        ),
        Attack("daemons and double forks: all dead when the call returns", survivor.format(kill=""), nobody_left),
        Attack(
            "daemons whose code first kills its parent process and itself: all dead when the call returns",
            _ABOVE + survivor.format(kill=kill.format(above="[GUARDIAN, MAIN]")),
            nobody_left,
        ),
        Attack(
            "number of files (1,024; at every level, all are deleted afterwards)",
            attempts("[open(str(n), 'w').close() for n in range(1500)]"),
        ),
    ]


def _on_neighbours() -> list[Attack]:
    """Attacks on resources that the kernel counts per user or keeps per file."""
    neighbours = (
        ("another execution uses up all in-flight descriptors", _MANY_IN_FLIGHT, _ONE_IN_FLIGHT),
        ("another execution uses up all timers and queued signals", _MANY_TIMERS, _ONE_TIMER),
        ("other executions see locks on library files", _LOCK + "lock()\n", _LOCK + "missed(lock)"),
    )
    return [
        Attack(name, _MISSED + code, neighbour=neighbour + _WAITS, neighbour_s=6)
        for name, neighbour, code in neighbours
    ]


def _on_the_host(host: Path, port: int) -> list[Attack]:
    """Attacks on files, processes and the network outside the execution."""
    parent, files = os.getpid(), [str(host / "open_to_all"), str(host / "mine")]
    zero_ns, disk = os.stat("/dev/zero").st_mtime_ns, os.statvfs("/usr/lib")
    neighbours = f"{tempfile.gettempdir()}/retool-sandbox-*/slot*/private"
    before = [_state(path) for path in files]

    def unchanged(_: ExecResult) -> bool:
        return all(os.path.exists(path) for path in files) and [_state(path) for path in files] == before

    return [
        Attack("reading host files that every user may read", attempts("open('/etc/passwd')")),
        Attack("reading files that only the trainer may read (mode 600)", attempts(f"open({files[1]!r})")),
        Attack(
            "reading a world-readable file in a directory closed to others (mode 700)",
            _CLIMB + attempts(f"open({str(host / 'closed/open_to_all')!r})", "climb()"),
        ),
        Attack(
            "changing times of the host's devices",
            attempts("os.utime('/dev/zero')"),
            lambda _: os.stat("/dev/zero").st_mtime_ns == zero_ns,
        ),
        Attack(
            "lowering its own OOM score, where the trainer lacks CAP_SYS_RESOURCE",
            attempts("open('/proc/self/oom_score_adj', 'w').write('0')"),
            lambda result: printed_refused(result) and result.level != Level.RLIMITS,
        ),
        Attack("learning that a host file exists", attempts("os.stat('/etc/passwd')", f"os.stat({files[0]!r})")),
        Attack(
            "writing, emptying, deleting or renaming host files",
            attempts(*(f"{call}({path!r}{rest})" for path in files for call, rest in _WRITES)),
            unchanged,
        ),
        Attack(
            "changing mode and times of the trainer's files",
            attempts(*(f"{call}({path!r}{rest})" for path in files for call, rest in _MODES)),
            unchanged,
        ),
        Attack(
            "network and Unix sockets",
            attempts(f"socket.create_connection(('127.0.0.1', {port}), 2)", "socket.socket(socket.AF_UNIX)"),
        ),
        Attack("seeing other processes", attempts(f"open('/proc/{parent}/stat')", f"os.stat('/proc/{parent}')")),
        Attack("signalling the trainer", attempts(f"os.kill({parent}, 0)")),
        Attack(
            "namespaces, ptrace and running programs",
            attempts("os.execv('/bin/true', ['true'])").replace("print(", _LIBC + "print("),
        ),
        Attack("reading the trainer's environment", attempts(f"open('/proc/{parent}/environ').read()")),
        Attack(
            "reading files of a concurrent execution",
            attempts("open(next(iter(glob.glob(GLOB)), '/nowhere/at/all'))").replace("GLOB", repr(neighbours)),
            neighbour_s=6,
        ),
        Attack(
            "reading the host's name",
            f"import os\nprint('refused' if os.uname().nodename != {os.uname().nodename!r} else 1)",
        ),
        Attack("reading the host's load", _LOAD),
        Attack("reading the disk's size", f"import os\nDISK = {disk.f_blocks * disk.f_frsize}\n" + _SAME_DISK),
    ]


_ABOVE = """
import os
MAIN, GUARDIAN = os.getpid(), os.getppid()
"""
# On a busy machine, the neighbour may not have used up all of it when the attack starts.
_MISSED = """
import time
def missed(take):
    for _ in range(12):
        try: take()
        except OSError:
            print("missed")
            return
        time.sleep(0.05)
    print("refused")
"""
_MANY_IN_FLIGHT = """
import socket
kept = []
try:
    for _ in range(40):
        kept.append(socket.socketpair())
        socket.send_fds(kept[-1][0], [b"x"], [0] * 200)
except OSError: pass
"""
_ONE_IN_FLIGHT = """
import socket
ours, theirs = socket.socketpair()
missed(lambda: socket.send_fds(ours, [b"x"], [0]))
"""
_MANY_TIMERS = """
import ctypes
create, timer = ctypes.CDLL(None).timer_create, ctypes.c_void_p()
while create(0, None, ctypes.byref(timer)) == 0: pass
"""
_ONE_TIMER = """
import ctypes
def take():
    if ctypes.CDLL(None).timer_create(0, None, ctypes.byref(ctypes.c_void_p())): raise OSError
missed(take)
"""
_LOCK = """
import fcntl
file = open("/etc/ld.so.cache", "rb")
def lock(): fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
_CLIMB = """
import os
def climb():
    for fd in range(4096):
        try: above, here = (os.stat(name, dir_fd=fd) for name in ("..", "."))
        except OSError: continue
        if not os.path.samestat(above, here): return
    raise PermissionError("no descriptor leads up")
"""
_WRITES = (("os.truncate", ", 0"), ("os.unlink", ""), ("open", ", 'w'"), ("os.rename", ", 'stolen'"))
_MODES = (("os.chmod", ", 0o640"), ("os.utime", ", (1, 1)"))
_LIBC = """
libc = ctypes.CDLL(None)
calls = (("unshare", 0x10000000), ("mount", b"none", b"/", b"tmpfs", 0, None), ("ptrace", 0, 0, 0, 0))
if os.fork() == 0: os._exit(0 if all(getattr(libc, name)(*arguments) < 0 for name, *arguments in calls) else 1)
done += [1] if os.wait()[1] else []
"""
_LOAD = """
try: print("done" if float(open("/proc/loadavg").read().split()[0]) > 0 else "refused")
except OSError: print("refused")
"""
_SAME_DISK = """
def size(path):
    try: return os.statvfs(path).f_blocks * os.statvfs(path).f_frsize
    except OSError: return 0
print('done' if DISK in (size('/'), size('.'), size('/usr/lib')) else 'refused')
"""


def _state(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return Path(path).read_text(), status.st_mode, status.st_mtime_ns


async def run_attacks(level: Level) -> dict[str, bool]:
    """Whether each attack fails at ``level``, for this user. Raises SandboxUnavailable."""
    prevented: dict[str, bool] = {}
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        socket.create_server(("127.0.0.1", 0)) as listener,
        _low_signal_limit(),
    ):
        host = Path(directory)
        host.chmod(0o777)
        port = listener.getsockname()[1]
        async with LocalSandbox(min_level=level, max_level=level, workers=2) as sandbox:
            for number in range(len(attacks(_create_files(host), port))):
                attack = attacks(_create_files(host), port)[number]
                neighbour = asyncio.ensure_future(sandbox.execute(attack.neighbour, run_timeout_s=attack.neighbour_s))
                await _ready(neighbour, attack.neighbour_s / 2)
                try:
                    result = await sandbox.execute(NOT_REDIRECTED + attack.code, **attack.options)  # type: ignore[arg-type]
                    prevented[attack.name] = attack.prevented(result)
                except SandboxUnavailable:  # the code also killed the zygote
                    prevented[attack.name] = False
                neighbour.cancel()
                await asyncio.wait((neighbour,))
    return prevented


async def _ready(neighbour: asyncio.Future[ExecResult], limit_s: float) -> None:
    """Wait until the neighbour has prepared its attack, at most ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not neighbour.done() and time.monotonic() < end_s and not processes_named(READY):
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def _low_signal_limit() -> Generator[None]:
    """Lower the limit of queued signals and timers, so that an execution quickly uses up all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (2000 if hard == resource.RLIM_INFINITY else min(2000, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (soft, hard))


def _create_files(host: Path) -> Path:
    for name, mode in (("open_to_all", 0o666), ("mine", 0o600)):
        (host / name).unlink(missing_ok=True)
        (host / name).write_text("weights")
        (host / name).chmod(mode)
    closed = host / "closed"
    closed.mkdir(mode=0o700, exist_ok=True)
    (closed / "open_to_all").touch(0o666)
    return host


def table(root: dict[Level, dict[str, bool]], user: dict[Level, dict[str, bool]]) -> str:
    """Return the table in Markdown, between its marks."""
    words = {(True, True): "yes", (True, False): "as root", (False, True): "as a user", (False, False): "**no**"}
    rows = [f"| attack | {' | '.join(LEVELS)} |", "|---" * (len(LEVELS) + 1) + "|"]
    for name in root[LEVELS[0]]:
        cells = [words[root[level][name], user[level][name]] for level in LEVELS]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join((START, *rows, END))


def main() -> None:
    """With a level, print this user's results as JSON; otherwise write the whole table."""
    if len(sys.argv) > 1:
        json.dump(asyncio.run(run_attacks(Level(sys.argv[1]))), sys.stdout)
        return
    from tests.sandbox.ordinary import make_ordinary_user

    root = {level: asyncio.run(run_attacks(level)) for level in LEVELS}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        ordinary = make_ordinary_user(Path(home))
        user = {level: ordinary.run_attacks(level) for level in LEVELS}
    text = README.read_text()
    start, end = text.index(START), text.index(END) + len(END)
    README.write_text(text[:start] + table(root, user) + text[end:])


if __name__ == "__main__":
    main()
