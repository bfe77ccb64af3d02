"""Limits, and attacks beyond the table: on the kernel, other executions and the supervisor."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.base import MAX_FILE_BYTES, ExecRequest, Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import named, processes_named, still_works, until_running

CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    print("done" if result >= 0 else errno.errorcode[ctypes.get_errno()])
"""
# Numbers below 424 are those of x86_64; from 424 on, all architectures share them.
DENIED = {
    "io_uring_setup": (425, "EPERM"),
    "userfaultfd": (323, "EPERM"),
    "bpf": (321, "EPERM"),
    "perf_event_open": (298, "EPERM"),
    "add_key": (248, "EPERM"),
    "keyctl": (250, "EPERM"),
    "process_vm_readv": (310, "EPERM"),
    "open_by_handle_at": (304, "EPERM"),
    "memfd_create": (319, "EPERM"),
    "memfd_secret": (447, "EPERM"),
    "pidfd_getfd": (438, "EPERM"),
    "setns": (308, "EPERM"),
    "clone3": (435, "ENOSYS"),
    "shmget": (29, "EPERM"),
    "personality": (135, "EPERM"),
    "seccomp": (317, "EPERM"),
    "no such call yet": (999, "ENOSYS"),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system-call numbers of x86_64")
async def test_dangerous_system_calls_are_refused_and_those_of_another_abi_kill(sandbox: LocalSandbox):
    code = CALLS + "\n".join(f"call({number}, 0, 0, 0, 0, 0)" for number, _ in DENIED.values())
    result = await sandbox.execute(code)
    assert dict(zip(DENIED, result.stdout.split(), strict=True)) == {k: errno for k, (_, errno) in DENIED.items()}
    x32 = await sandbox.execute(CALLS + "call(0x40000000 + 39)")
    assert (x32.status, x32.return_code) == ("finished", -signal.SIGSYS)


async def test_privileges_limits_and_the_supervisor_are_out_of_reach(sandbox: LocalSandbox):
    """At landlock, an ordinary user's code has the trainer's uid.

    The filter must therefore refuse attacks for which the same uid is enough. A session has its own
    share of the cores.
    """
    code = f"""
import ctypes, fcntl, os, resource, socket
read_end, write_end = os.pipe()
unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
def attempt(attack):
    try: attack(); print("done")
    except (OSError, ValueError): print("refused")
for attack in (
    lambda: resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1)),
    lambda: fcntl.fcntl(read_end, 8, {os.getpid()}),  # F_SETOWN
    lambda: fcntl.fcntl(read_end, 10, 9),  # F_SETSIG
    lambda: os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19),
    lambda: os.sched_setaffinity({os.getpid()}, [0]),
    lambda: os.setuid(0),
    lambda: os.setgroups([0]),
    lambda: os.chroot("/"),
    lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    *(lambda n=getattr(resource, "RLIMIT_" + name): resource.setrlimit(n, unlimited)
      for name in ("NPROC", "FSIZE", "NOFILE", "CORE")),
): attempt(attack)
if os.fork() == 0:
    attempt(os.setsid)
    os._exit(0)
os.wait()
libc, nobody = ctypes.CDLL(None), os.getuid() == 65534
print(resource.getrlimit(resource.RLIMIT_CORE), fcntl.fcntl(0, fcntl.F_GETFD), os.getuid() != 0 or "root")
print(sum(libc.prctl(23, c, 0, 0, 0) == 1 for c in range(41)) if nobody else 0)  # bounding set
"""
    refused, bounding = (await sandbox.execute(code)).stdout.split("(0, 0) 0 True\n")
    assert refused == "refused\n" * 15
    if sandbox.level == Level.NAMESPACES:
        assert bounding == "0\n"


async def test_only_the_standard_streams_and_the_control_socket_are_open(sandbox: LocalSandbox):
    code = """
import os
for fd in range(4096):
    try: os.fstat(fd)
    except OSError: continue
    print(fd)
"""
    opened = [int(fd) for fd in (await sandbox.execute(code)).stdout.split()]
    if sandbox.level != Level.NAMESPACES:
        opened = [fd for fd in opened if fd < 200]  # from 200 on: Python's directories, for root
    assert opened == [0, 1, 2, 3]


FLOOD = "try:\n  while True: os.write(3, bytes(1 << 20))\nexcept OSError: pass"


@pytest.mark.parametrize(
    "attack",
    [
        "os.write(3, b'garbage' * 1000)",
        "os.write(3, struct.pack('=cI', b'D', 4) + struct.pack('=i', 0))",  # claims to be done
        "os.write(3, struct.pack('=cIII', b'N', 8, 0xFFFFFFF, 7))",  # a file that was not requested
        f"os.write(3, struct.pack('=cI', b'N', {4 * MAX_FILE_BYTES}))\n{FLOOD}",  # is cut off
        "os.dup2(1, 3)",
    ],
)
async def test_abuse_of_the_control_socket_changes_only_its_own_result(strongest: LocalSandbox, attack: str):
    code = f"import os, struct\n{attack}\nos._exit(9)"
    result = await strongest.execute(code, fetch_files=["absent"], run_timeout_s=20)
    assert (result.status, result.return_code, dict(result.files)) == ("finished", 9, {})
    assert await still_works(strongest)


async def test_a_fork_bomb_is_over_when_the_call_returns(sandbox: LocalSandbox):
    name = f"rt-bomb-{os.getpid() % 10_000}"
    started = time.monotonic()
    result = await sandbox.execute(
        named(name) + "while True:\n  try: os.fork()\n  except OSError: pass", run_timeout_s=1
    )
    assert result.status == "time_limit"
    assert processes_named(name) == []
    assert time.monotonic() - started < 8
    assert await still_works(sandbox)


# Each flag alone. The filter answers ENOSYS first. The kernel itself would answer EPERM to a
# process without capabilities, but would create a user namespace.
CLONES = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
SIGCHLD, CLONE = 17, 220 if os.uname().machine == "aarch64" else 56
FLAGS = dict(NEWTIME=0x80, NEWNS=0x20000, NEWCGROUP=0x2000000, NEWUTS=0x4000000, NEWIPC=0x8000000,
             NEWUSER=0x10000000, NEWPID=0x20000000, NEWNET=0x40000000)
for name, flag in FLAGS.items():
    pid = libc.syscall(CLONE, ctypes.c_ulong(flag | SIGCHLD), None, None, None, None)
    if pid == 0: os._exit(0)
    if pid > 0 or ctypes.get_errno() != errno.ENOSYS: print(name, pid, errno.errorcode.get(ctypes.get_errno()))
pid = libc.syscall(CLONE, ctypes.c_ulong(SIGCHLD), None, None, None, None)
if pid == 0: os._exit(0)
print("a fork", os.waitpid(pid, 0)[1])
"""


async def test_no_namespace_can_be_cloned_by_any_flag(strongest: LocalSandbox):
    assert (await strongest.execute(CLONES)).stdout == "a fork 0\n"


# ------------------------------------------------------------------- limits


async def test_infinite_loop_ends_at_the_time_limit_and_keeps_its_output(sandbox: LocalSandbox):
    result = await sandbox.execute("print('begun', end='')\nwhile True: pass", run_timeout_s=1.5)
    assert (result.status, result.return_code, result.stdout) == ("time_limit", None, "begun")
    assert 1.5 <= result.run_s < 5


async def test_an_execution_killed_for_memory_reports_it(sandbox: LocalSandbox):
    """Each process is below the limit, and the kernel kills the largest one, the parent."""
    if not sandbox.memory_is_bounded_per_execution:
        pytest.skip("no writable memory cgroup: memory is bounded per process only")
    code = """
import os, time
read_end, write_end = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        x = b"x" * (80 << 20)
        os.write(write_end, b"1")
        time.sleep(60)
for _ in range(3): os.read(read_end, 1)
print("filled", flush=True)
x = b"x" * (230 << 20)
"""
    result = await sandbox.execute(code, memory_limit_mb=256)
    assert (result.status, result.return_code, result.stdout) == ("memory_limit", None, "filled\n")
    assert await still_works(sandbox)


@pytest.mark.parametrize(
    "fields",
    [
        *({"run_timeout_s": seconds} for seconds in (0, -1, float("nan"), float("inf"))),
        *({"files": {name: b"x"}} for name in ("../x", "/etc/x", "a/../../x", "", "a\0b", ".", "a" * 1025)),
        {"fetch_files": ["../x"]},
        {"fetch_files": ["x"] * 257},
    ],
)
def test_an_invalid_limit_or_path_is_rejected(fields: dict[str, Any]):
    with pytest.raises(ConfigError, match="run_timeout_s" if "run_timeout_s" in fields else "file path|most 256"):
        ExecRequest(code="print('ran')", **fields)


def test_a_huge_limit_is_clamped():
    request = ExecRequest(code="1", run_timeout_s=1e9, memory_limit_mb=10**9)
    assert (request.run_timeout_s, request.memory_limit_mb) == (600.0, 65_536)
    assert ExecRequest(code="1", memory_limit_mb=1).memory_limit_mb == 16


# ----------------------------------------------------------- files and processes


async def test_a_fetched_symlink_shows_only_what_the_code_could_read(sandbox: LocalSandbox):
    links = "import os; os.symlink('/etc/shadow', 'secret'); os.symlink('/dev/zero', 'zero')"
    result = await sandbox.execute(links, fetch_files=["secret", "zero"])
    assert (result.ok, result.stderr, result.files) == (True, "", {})


async def test_the_environment_has_only_a_few_safe_keys(sandbox: LocalSandbox):
    result = await sandbox.execute("import os; sorted(os.environ)")
    assert result.stdout == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']\n"
    initial = await sandbox.execute("'SECRET' in open('/proc/self/environ').read()")
    assert initial.stdout == "False\n" or "Error: [Errno" in initial.stderr
    if sandbox.level == Level.NAMESPACES:  # mountinfo, cmdline and environ would show paths of the host
        assert (await sandbox.execute("import os; os.path.exists('/proc')")).stdout == "False\n"


async def test_a_grandchild_holding_stdout_does_not_delay_the_return(sandbox: LocalSandbox):
    started = time.monotonic()
    result = await sandbox.execute("import os, time\nif os.fork() == 0: time.sleep(60)\nelse: print('parent done')")
    assert (result.status, result.stdout) == ("finished", "parent done\n")
    assert time.monotonic() - started < 3


async def test_a_cancelled_call_kills_its_child_and_frees_its_slot(sandbox: LocalSandbox):
    name = f"rt-cancel-{os.getpid() % 10_000}"
    code = named(name) + "while True: pass"
    calls = [asyncio.ensure_future(sandbox.execute(code, run_timeout_s=60)) for _ in range(2)]
    await until_running(name, 2)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert processes_named(name) == []
    assert await still_works(sandbox)
