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
from tests.sandbox.sandbox_helpers import processes_named, still_works, until_running

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
async def test_dangerous_system_calls_are_refused(sandbox: LocalSandbox):
    code = CALLS + "\n".join(f"call({number}, 0, 0, 0, 0, 0)" for number, _ in DENIED.values())
    result = await sandbox.execute(code)
    assert dict(zip(DENIED, result.stdout.split(), strict=True)) == {k: errno for k, (_, errno) in DENIED.items()}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is an ABI of x86_64")
async def test_a_call_of_another_abi_kills_the_code(sandbox: LocalSandbox):
    result = await sandbox.execute(CALLS + "call(0x40000000 + 39)")
    assert (result.status, result.return_code) == ("finished", -signal.SIGSYS)


async def test_privileges_limits_and_the_supervisor_are_out_of_reach(sandbox: LocalSandbox):
    """At landlock, an ordinary user's code has the trainer's uid.

    The filter must therefore refuse attacks for which the same uid is enough.
    """
    code = f"""
import ctypes, fcntl, os, resource
read_end, write_end = os.pipe()
unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
for attack in (
    lambda: resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1)),
    lambda: fcntl.fcntl(read_end, 8, {os.getpid()}),  # F_SETOWN
    lambda: fcntl.fcntl(read_end, 10, 9),  # F_SETSIG
    lambda: os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19),
    lambda: os.sched_setaffinity({os.getpid()}, [0]),
    lambda: os.setuid(0),
    lambda: os.setgroups([0]),
    lambda: os.chroot("/"),
    *(lambda n=getattr(resource, "RLIMIT_" + name): resource.setrlimit(n, unlimited)
      for name in ("NPROC", "FSIZE", "NOFILE", "CORE")),
):
    try: attack(); print("done")
    except (OSError, ValueError): print("refused")
libc, nobody = ctypes.CDLL(None), os.getuid() == 65534
print(resource.getrlimit(resource.RLIMIT_CORE), fcntl.fcntl(0, fcntl.F_GETFD), os.getuid() != 0 or "root")
print(sum(libc.prctl(23, c, 0, 0, 0) == 1 for c in range(41)) if nobody else 0)  # bounding set
"""
    refused, bounding = (await sandbox.execute(code)).stdout.split("(0, 0) 0 True\n")
    assert refused == "refused\n" * 12
    if sandbox.level == Level.NAMESPACES:
        assert bounding == "0\n"


async def test_no_socket_family_is_open(sandbox: LocalSandbox):
    code = """
import socket
opened = []
for family in range(0, 46):
    for kind in (1, 2, 3, 5):
        try: opened.append(socket.socket(family, kind))
        except OSError: pass
try: opened.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
except OSError: pass
print(opened)
"""
    assert (await sandbox.execute(code)).stdout == "[]\n"


async def test_only_the_standard_streams_and_the_control_socket_are_open(sandbox: LocalSandbox):
    code = """
import os
opened = []
for fd in range(4096):
    try: os.fstat(fd)
    except OSError: continue
    opened.append(fd)
print(opened)
"""
    result = await sandbox.execute(code)
    opened = [fd for fd in eval(result.stdout) if fd < 200]  # from 200 on: Python's directories, for root
    assert opened == [0, 1, 2, 3]
    if sandbox.level == Level.NAMESPACES:
        assert result.stdout == "[0, 1, 2, 3]\n"


@pytest.mark.parametrize(
    "attack",
    [
        "os.write(3, b'garbage' * 1000)",
        "os.write(3, struct.pack('=cI', b'D', 4) + struct.pack('=i', 0))",  # claims to be done
        "os.write(3, struct.pack('=cI', b'N', 0xFFFFFFFF))",  # announces a file of 4 GiB
        "os.write(3, struct.pack('=cIII', b'N', 8, 0xFFFFFFF, 7))",  # a file that was not requested
        "os.dup2(1, 3)",
    ],
)
async def test_abuse_of_the_control_socket_changes_only_its_own_result(strongest: LocalSandbox, attack: str):
    result = await strongest.execute(f"import os, struct\n{attack}\nos._exit(9)", run_timeout_s=20)
    assert (result.status, result.return_code, dict(result.files)) == ("finished", 9, {})
    assert (await strongest.execute("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize("kind", "DR")
async def test_a_forged_frame_does_not_lift_the_time_limit(strongest: LocalSandbox, kind: str):
    frame = f"struct.pack('=cI', b'{kind}', 4) + struct.pack('=i', 5)"
    code = f"import os, struct, time\nos.write(3, {frame})\ntime.sleep(60)"
    started = time.monotonic()
    result = await strongest.execute(code, run_timeout_s=1)
    assert time.monotonic() - started < 10
    assert (result.status, result.return_code) == ("time_limit", None)


async def test_a_flood_on_the_control_socket_is_cut_off(strongest: LocalSandbox):
    announce = f"os.write(3, struct.pack('=cI', b'N', {4 * MAX_FILE_BYTES}))"
    code = f"import os, struct\n{announce}\nwhile True: os.write(3, bytes(1 << 20))"
    result = await strongest.execute(code, run_timeout_s=10)
    assert not result.ok and result.files == {}


@pytest.mark.parametrize("escape", ["pass", "os.setsid()"])
async def test_a_fork_bomb_is_over_when_the_call_returns(sandbox: LocalSandbox, escape: str):
    name = f"rt-bomb-{os.getpid() % 10_000}"
    code = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
while True:
    try:
        if os.fork() == 0: {escape}
    except OSError: pass
"""
    started = time.monotonic()
    result = await sandbox.execute(code, run_timeout_s=1)
    assert result.status == "time_limit"
    assert processes_named(name) == []
    assert time.monotonic() - started < 8
    assert (await sandbox.execute("1 + 1")).stdout == "2\n"


async def test_no_process_gets_a_session_and_with_it_its_own_share_of_the_cores(sandbox: LocalSandbox):
    code = "import os\nif os.fork(): os.wait()\nelse:\n    try: os.setsid()\n    except OSError as error: print(error)"
    assert (await sandbox.execute(code)).stdout == "[Errno 1] Operation not permitted\n"


async def test_a_printing_loop_does_not_starve_other_executions(sandbox: LocalSandbox):
    noisy = asyncio.ensure_future(sandbox.execute("while True: print('x' * 1000)", run_timeout_s=3))
    await asyncio.sleep(0.3)
    quiet = await sandbox.execute("1 + 1")
    assert quiet.stdout == "2\n" and not noisy.done()
    assert (await noisy).status == "time_limit"


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
    assert result.text == f"begun\n[stopped at the time limit, after {result.run_s:.1f} s]"


async def test_children_below_the_limit_are_limited_together(sandbox: LocalSandbox):
    if not sandbox.memory_is_bounded_per_execution:
        pytest.skip("no writable memory cgroup: memory is bounded per process only")
    code = """
import os, time
children = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        x = b"x" * (200 << 20)
        time.sleep(1)
        os._exit(0)
    children.append(pid)
killed = sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9 for pid in children)
print("killed" if killed >= 2 else f"only {killed} killed")
"""
    result = await sandbox.execute(code, memory_limit_mb=256)
    assert (result.status, result.stdout) == ("finished", "killed\n")


async def test_an_execution_killed_for_memory_reports_it(sandbox: LocalSandbox):
    if not sandbox.memory_is_bounded_per_execution:
        pytest.skip("no writable memory cgroup: memory is bounded per process only")
    # The kernel kills the largest process. Here that is the parent, while its children use most of
    # the cgroup's memory.
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
    assert result.text == "filled\n[stopped at the memory limit]"
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


# ------------------------------------------------------------- file system


async def test_a_fetched_symlink_shows_only_what_the_code_could_read(sandbox: LocalSandbox):
    result = await sandbox.execute("import os; os.symlink('/etc/shadow', 'link')", fetch_files=["link"])
    assert result.ok and result.files == {}
    result = await sandbox.execute("import os; os.symlink('/dev/zero', 'zero')", fetch_files=["zero"])
    assert (result.ok, result.stderr, result.files) == (True, "", {})


# ----------------------------------------------------------------- processes


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
    code = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\nwhile True: pass"
    calls = [asyncio.ensure_future(sandbox.execute(code, run_timeout_s=60)) for _ in range(2)]
    await until_running(name, 2)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert processes_named(name) == []
    assert await still_works(sandbox)
