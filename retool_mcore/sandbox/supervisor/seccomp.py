"""Seccomp filters: an allow-list of system calls, which libseccomp compiles once.

Level rlimits also works without libseccomp; its filter is then ``without_sockets``.

``_ALLOWED`` calls are allowed, unless an option of ``compile_filter`` refuses them; some others are
allowed only with certain arguments. ``_REFUSED`` lists calls that an attacker or a curious model
would try; they fail with EPERM, which reads better in a traceback. ``_UNSUPPORTED`` calls fail with
EOPNOTSUPP. All others fail with ENOSYS, as on an old kernel, so that libraries fall back.
libseccomp resolves call numbers for the native architecture and denies all other architectures.

setsid is refused because Linux gives each session an equal share of the cores (autogroup). A fork
bomb of 64 sessions would leave the trainer and the process that has to end the bomb 1/65 each.
"""

import errno
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from functools import cache

# Placeholder that `for_process` replaces with the pid of the process that installs the program.
_OWN_PID = 0x7A3D_51E9

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3
open openat openat2 creat stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat
getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link
linkat symlink symlinkat truncate ftruncate fallocate fsync fdatasync sync_file_range umask chmod fchmod
fchmodat fchmodat2 utime utimes utimensat futimesat fadvise64 copy_file_range sendfile flock
pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4 mmap munmap
mremap mprotect madvise brk msync mincore mlock munlock get_mempolicy membarrier futex futex_waitv
set_robust_list get_robust_list set_tid_address rseq arch_prctl rt_sigaction rt_sigprocmask rt_sigreturn
rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack restart_syscall fork vfork exit exit_group wait4 waitid
pidfd_open getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid
getsid setpgid getpriority sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min getcpu nanosleep clock_nanosleep clock_gettime clock_getres
gettimeofday time times alarm pause getitimer setitimer timer_create timer_settime timer_gettime
timer_getoverrun timer_delete getrlimit setrlimit getrusage uname getrandom sendto recvfrom
sendmsg recvmsg shutdown getsockopt setsockopt getsockname getpeername
"""

_REFUSED = """
socket connect bind listen accept accept4 sendmmsg recvmmsg execve execveat unshare setns mount umount2
pivot_root chroot mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick ptrace process_vm_readv
process_vm_writev process_madvise kcmp pidfd_getfd pidfd_send_signal setuid setgid setreuid setregid setresuid
setresgid setfsuid setfsgid setgroups capset chown fchown lchown fchownat bpf perf_event_open userfaultfd
io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key init_module finit_module
delete_module kexec_load kexec_file_load reboot swapon swapoff syslog acct quotactl sethostname setdomainname
settimeofday clock_settime clock_adjtime adjtimex iopl ioperm mknod mknodat name_to_handle_at open_by_handle_at
fanotify_init inotify_init inotify_init1 memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semctl
semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink setpriority sched_setaffinity sched_setscheduler
sched_setattr sched_setparam ioprio_set nice vhangup personality seccomp landlock_create_ruleset
landlock_add_rule landlock_restrict_self splice tee vmsplice rt_sigqueueinfo rt_tgsigqueueinfo setxattr
lsetxattr fsetxattr statfs fstatfs sysinfo setsid
"""

_MODES_AND_TIMES = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "utimensat", "futimesat",
)  # fmt: skip
# These fail with EOPNOTSUPP, as on a file system without extended attributes; shutil handles that.
_UNSUPPORTED = ("listxattr", "llistxattr", "flistxattr", "getxattr", "lgetxattr", "fgetxattr")
_OPENING = ("open", "openat", "openat2")
_CLONE_NEW_ANYTHING = 0x7E02_0080  # all CLONE_NEW* flags, including CLONE_NEWTIME
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
# Calls that are allowed for certain values of one argument: its position, the values.
_BY_COMMAND = {
    "prctl": (0, (15, 16, 23, 3)),  # PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_DUMPABLE
    "ioctl": (1, (termios.TCGETS, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX)),
    # Duplicate fds, get and set flags, lock, get and set the pipe size; not F_SETOWN or F_SETSIG.
    "fcntl": (1, (*range(8), 36, 37, 38, fcntl.F_DUPFD_CLOEXEC, fcntl.F_SETPIPE_SZ, fcntl.F_GETPIPE_SZ)),
}


@cache
def compile_filter(*, only_own_signals: bool, keep_modes: bool = False, keep_lengths: bool = False) -> bytes:
    """Compile the filter to a BPF program; pass it through ``for_process`` before installing it.

    ``only_own_signals`` denies kill and tgkill for all other processes and tkill altogether. Needed
    where neither a pid namespace nor Landlock (ABI 6) confines signals.
    ``keep_modes`` denies changing mode and times of any file, by path or by fd. Needed where the
    code has the trainer's uid and can reach its files.
    ``keep_lengths`` denies truncate by path, openat2, and open with O_RDONLY|O_TRUNC. Needed where
    Landlock does not handle truncation (before ABI 3).

    Raises ImportError, OSError or RuntimeError if libseccomp or its Python bindings are missing.
    """
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    filter_ = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def add(action: int, name: str, *conditions: pyseccomp.Arg) -> None:
        try:
            number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        except (OSError, ValueError):
            return  # unknown to this libseccomp: gets ENOSYS like any other unlisted call
        if number >= 0:
            filter_.add_rule(action, number, *conditions)

    refuse = pyseccomp.ERRNO(errno.EPERM)
    refused = [*_REFUSED.split(), *(_MODES_AND_TIMES if keep_modes else ()), *(["truncate"] if keep_lengths else ())]
    for name in refused:
        add(refuse, name)
    if keep_lengths:
        _refuse_emptying(add, refuse)
    for name in _ALLOWED.split():
        if name not in refused and not (keep_lengths and name in _OPENING):
            add(pyseccomp.ALLOW, name)
    for name in _UNSUPPORTED:
        add(pyseccomp.ERRNO(errno.EOPNOTSUPP), name)
    is_value = pyseccomp.EQ
    add(pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _CLONE_NEW_ANYTHING, 0))
    # asyncio wakes itself through a socketpair. A stream pair can reach only its other end.
    stream = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, _SOCK_TYPE_MASK, _SOCK_STREAM)
    add(pyseccomp.ALLOW, "socketpair", pyseccomp.Arg(0, is_value, _AF_UNIX), stream)
    for name, (position, commands) in _BY_COMMAND.items():
        for command in commands:
            add(pyseccomp.ALLOW, name, pyseccomp.Arg(position, is_value, command))
    # A process may change only its own limits. At level landlock, unless root runs the sandbox, the
    # trainer has the same uid and would be a target.
    add(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(0, is_value, 0))
    add(refuse, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))
    for name in ("kill", "tgkill"):
        if only_own_signals:
            add(pyseccomp.ALLOW, name, pyseccomp.Arg(0, is_value, _OWN_PID))
            add(refuse, name, pyseccomp.Arg(0, pyseccomp.NE, _OWN_PID))
        else:
            add(pyseccomp.ALLOW, name)
    add(refuse if only_own_signals else pyseccomp.ALLOW, "tkill")
    fd = os.memfd_create("seccomp")
    with os.fdopen(fd, "w+b") as program:
        filter_.export_bpf(program)
        program.seek(0)
        return program.read()


def _refuse_emptying(add: Callable[..., None], refuse: int) -> None:
    """Allow open and openat, but O_TRUNC only together with O_WRONLY or O_RDWR.

    Landlock before ABI 3 treats O_RDONLY|O_TRUNC as a read. openat2 gets no rule and so fails with
    ENOSYS: its flags are behind a pointer, which a filter cannot follow.
    """
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    def flags(position: int, value: int) -> pyseccomp.Arg:
        return pyseccomp.Arg(position, pyseccomp.MASKED_EQ, os.O_ACCMODE | os.O_TRUNC, value)

    for name, position in (("open", 1), ("openat", 2)):
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
            add(pyseccomp.ALLOW, name, flags(position, mode))
            writes = mode in (os.O_WRONLY, os.O_RDWR)
            add(pyseccomp.ALLOW if writes else refuse, name, flags(position, mode | os.O_TRUNC))


# AUDIT_ARCH (linux/audit.h), and the call numbers of socket and socketpair.
_SOCKET_CALLS = {"x86_64": (0xC000_003E, 41, 53), "aarch64": (0xC000_00B7, 198, 199)}
_IO_URING_SETUP, _FIRST_X32_CALL = 425, 0x4000_0000  # io_uring opens sockets without socket(2)
_ALLOW, _REFUSE, _KILL = 0x7FFF_0000, 0x0005_0000 | errno.EPERM, 0x8000_0000  # return values of a filter
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # classic BPF opcodes
_CALL, _ARCHITECTURE, _SECOND_ARGUMENT = 0, 4, 24  # offsets in struct seccomp_data (little-endian arguments)


def without_sockets() -> bytes:
    """Build a filter that allows every call except those that create sockets.

    It denies socket and io_uring_setup with EPERM, as well as every x32 call, because x32 numbers
    differ. socketpair may create only connected streams. A call of another architecture kills the
    process. Raises OSError on machines other than x86-64 and arm64.
    """
    machine = os.uname().machine
    if machine not in _SOCKET_CALLS:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}")
    architecture, socket, socketpair = _SOCKET_CALLS[machine]
    program = (  # opcode, instructions to skip if true, if false, operand
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, 10, architecture),  # else kill
        (_LOAD, 0, 0, _CALL),
        (_AT_LEAST, 7, 0, _FIRST_X32_CALL),  # refuse
        (_EQUAL, 6, 0, socket),
        (_EQUAL, 5, 0, _IO_URING_SETUP),
        (_EQUAL, 0, 3, socketpair),  # else allow
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_EQUAL, 0, 1, _SOCK_STREAM),  # else refuse
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _KILL),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def for_process(program: bytes, pid: int) -> bytes:
    """Return ``program`` with the placeholder of ``only_own_signals`` replaced by ``pid``."""
    return program.replace(struct.pack("=I", _OWN_PID), struct.pack("=I", pid))
