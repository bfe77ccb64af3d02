"""Levels are tried in order; a refusal explains the remedy; no level is lowered silently."""

import shlex
import subprocess
import sys

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox import open_sandbox

# Runs in a fresh process under a system-call filter, as a container runtime installs one.
REFUSED_SETUP = """
import asyncio, errno, logging, sys
import pyseccomp
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
refuse = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for name in {refused!r}:
    refuse.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
refuse.load()
async def main():
    try:
        async with LocalSandbox(min_level=Level({min_level!r}), workers=1) as sandbox:
            print("level", sandbox.level, (await sandbox.execute("6 * 7")).stdout)
    except SandboxUnavailable as error:
        print("refused:", error)
asyncio.run(main())
"""


def run_refused(refused: list[str], min_level: str) -> str:
    code = REFUSED_SETUP.format(refused=refused, min_level=min_level)
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300)


def test_a_refused_level_names_the_refused_call_and_the_remedy():
    text = run_refused(["unshare"], "namespaces")
    assert "refused: This machine does not support min_level = 'namespaces'" in text
    assert "unshare(0x7c020000): Operation not permitted" in text
    assert "user.max_user_namespaces" in text
    assert "level landlock" not in text


def test_the_weakest_level_logs_a_warning():
    text = run_refused(["unshare", "landlock_create_ruleset"], "rlimits")
    assert "level rlimits 42" in text
    assert "WARNING sandbox level is rlimits: model code can read files" in text


def test_namespaces_work_in_a_container_with_one_uid():
    """As in Docker: only uid 0 is mapped, and parts of /proc are hidden by mounts."""
    code = REFUSED_SETUP.format(refused=["getpgrp"], min_level="namespaces")
    inside = f"mount --bind /dev/null /proc/timer_list && exec {sys.executable} -c {shlex.quote(code)}"
    command = ["unshare", "-Urmpf", "--mount-proc", "bash", "-c", inside]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no such container can be made here: {result.stderr}")
    assert result.stdout.endswith("level namespaces 42\n\n"), result.stdout


WITHOUT_LIBSECCOMP = """
import asyncio, sys
sys.modules["pyseccomp"] = None  # an import fails, as without libseccomp
from retool_mcore.sandbox import open_sandbox
CODE = '''
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *arguments) >= 0 or errno.errorcode[ctypes.get_errno()]
def attempt(make, *arguments):
    try: return make(*arguments)
    except PermissionError: return "EPERM"
print({attempt(socket.socket, family, kind) for family in (1, 2, 10, 16, 17) for kind in (1, 2, 3)})
print({attempt(socket.socketpair, socket.AF_UNIX, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)})
print(call(425, 8, 0), call(0x40000000 + 41, 1, 1, 0) if os.uname().machine == "x86_64" else "EPERM")
print(len(socket.socketpair()))
'''
async def main():
    async with open_sandbox(min_level="rlimits", workers=1) as sandbox:
        result = await sandbox.execute(CODE, run_timeout_s=60)
        print(result.level, result.text, sep="\\n")
asyncio.run(main())
"""


def test_without_libseccomp_no_socket_opens_at_rlimits():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBSECCOMP], capture_output=True, text=True, check=True)
    assert done.stdout == "rlimits\n{'EPERM'}\n{'EPERM'}\nEPERM EPERM\n2\n", done.stdout + done.stderr


OWN_SIGNALS_ONLY = """
import os
from retool_mcore.sandbox.supervisor import kernel, seccomp
kernel.forbid_new_privileges()
kernel.install_seccomp(seccomp.for_process(seccomp.compile_filter(only_own_signals=True), os.getpid()))
os.kill(os.getpid(), 0)
for target in (os.getppid(), 1, 0, -1):
    try: os.kill(target, 0); print("sent")
    except PermissionError: print("refused")
"""


def test_without_landlocks_signal_scope_seccomp_refuses_signals():
    output = subprocess.check_output([sys.executable, "-c", OWN_SIGNALS_ONLY], text=True)
    assert output.split() == ["refused"] * 4


@pytest.mark.parametrize(
    "spec, options, message",
    [
        ("local", {"min_level": "strong"}, "Unknown min_level 'strong'"),
        ("local", {"workers": 0}, "workers = 0"),
        ("ftp://x", {}, "neither 'local' nor a list of"),
        ([], {}, "neither 'local' nor a list of"),
        ("local", {"workers": 4, "sessions": 2}, "sessions = 2 is below workers = 4"),
    ],
)
def test_bad_options_are_configuration_errors(spec: object, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        open_sandbox(spec, **options)  # type: ignore[arg-type]
