"""The system calls that an execution may make: an allow-list, compiled once by libseccomp.

Level rlimits runs without libseccomp, too. ``without_sockets`` is its filter then.

A call that no list here names gets ENOSYS, as on an old kernel, so that libraries fall back. A call
that an attacker or a curious model would try gets EPERM, which reads better in a traceback.
libseccomp uses the call numbers of the machine's own architecture and refuses all other
architectures.
"""

import errno
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from functools import cache

# A placeholder: `for_process` replaces it by the pid of the process that installs the program.
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
getsid setpgid setsid getpriority sched_yield sched_getaffinity sched_getparam sched_getscheduler
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
lsetxattr fsetxattr statfs fstatfs sysinfo
"""

_MODES_AND_TIMES = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "utimensat", "futimesat",
)  # fmt: skip
# As on a file system without extended attributes, which shutil's copying understands.
_UNSUPPORTED = ("listxattr", "llistxattr", "flistxattr", "getxattr", "lgetxattr", "fgetxattr")
_OPENING = ("open", "openat", "openat2")
_CLONE_NEW_ANYTHING = 0x7E02_0080  # every CLONE_NEW* flag, time namespaces too
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
_PR_SET_NAME, _PR_GET_NAME, _PR_CAPBSET_READ, _PR_GET_DUMPABLE = 15, 16, 23, 3
# Duplicate, flags, locks, pipe size.
_FCNTL_COMMANDS = (*range(8), 36, 37, 38, fcntl.F_DUPFD_CLOEXEC, fcntl.F_SETPIPE_SZ, fcntl.F_GETPIPE_SZ)
_FIONREAD, _FIONBIO, _FIOCLEX, _FIONCLEX = 0x541B, 0x5421, 0x5451, 0x5450


@cache
def compile_filter(*, only_own_signals: bool, keep_modes: bool = False, keep_lengths: bool = False) -> bytes:
    """Compile the filter to a BPF program; pass it through ``for_process`` before installing it.

    ``only_own_signals`` refuses kill and tgkill for every other process: needed where neither a pid
    namespace nor Landlock (ABI 6) keeps signals in. ``keep_modes`` refuses to change the mode and
    times of any file, by name or by descriptor: needed where the code has the trainer's uid and its
    files are in sight. ``keep_lengths`` refuses to truncate by name, and to empty a file by opening
    it for reading: needed where Landlock does not know truncation (before ABI 3). Raises OSError or
    RuntimeError where libseccomp is not installed.
    """
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    filter_ = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def add(action: int, name: str, *conditions: pyseccomp.Arg) -> None:
        try:
            number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        except (OSError, ValueError):
            return  # this libseccomp does not know the call, which so gets ENOSYS like any unnamed one
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
    # socketpair is how asyncio wakes itself; a stream pair can reach nothing but its other end.
    stream = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, _SOCK_TYPE_MASK, _SOCK_STREAM)
    add(pyseccomp.ALLOW, "socketpair", pyseccomp.Arg(0, is_value, _AF_UNIX), stream)
    for option in (_PR_SET_NAME, _PR_GET_NAME, _PR_CAPBSET_READ, _PR_GET_DUMPABLE):
        add(pyseccomp.ALLOW, "prctl", pyseccomp.Arg(0, is_value, option))
    for command in (termios.TCGETS, _FIONREAD, _FIONBIO, _FIOCLEX, _FIONCLEX):
        add(pyseccomp.ALLOW, "ioctl", pyseccomp.Arg(1, is_value, command))
    # A process may change only its own limits, and may not use F_SETOWN or F_SETSIG: at level
    # landlock, when an ordinary user runs it, the trainer has the same uid.
    add(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(0, is_value, 0))
    add(refuse, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))
    for command in _FCNTL_COMMANDS:
        add(pyseccomp.ALLOW, "fcntl", pyseccomp.Arg(1, is_value, command))
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
    """Allow the calls that open files, but O_TRUNC only for files that are opened for writing.

    Landlock before ABI 3 looks at O_RDONLY|O_TRUNC as at reading. openat2 is left unknown: its
    flags lie where no filter can read them.
    """
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    def flags(position: int, value: int) -> pyseccomp.Arg:
        return pyseccomp.Arg(position, pyseccomp.MASKED_EQ, os.O_ACCMODE | os.O_TRUNC, value)

    for name, position in (("open", 1), ("openat", 2)):
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
            add(pyseccomp.ALLOW, name, flags(position, mode))
            writes = mode in (os.O_WRONLY, os.O_RDWR)
            add(pyseccomp.ALLOW if writes else refuse, name, flags(position, mode | os.O_TRUNC))


# Architecture (linux/audit.h), and the numbers of socket and socketpair.
_SOCKET_CALLS = {"x86_64": (0xC000_003E, 41, 53), "aarch64": (0xC000_00B7, 198, 199)}
_IO_URING_SETUP, _FIRST_X32_CALL = 425, 0x4000_0000  # a ring opens sockets without the call; x32 numbers differ
_ALLOW, _REFUSE, _KILL = 0x7FFF_0000, 0x0005_0000 | errno.EPERM, 0x8000_0000  # what a filter returns
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # the operations of classic BPF
_CALL, _ARCHITECTURE, _SECOND_ARGUMENT = 0, 4, 24  # where struct seccomp_data has them; arguments as little-endian


def without_sockets() -> bytes:
    """A filter that opens no socket but a pair of connected streams, and allows all other calls.

    Raises OSError on other machines than x86-64 and arm64, whose call numbers are not known here.
    """
    machine = os.uname().machine
    if machine not in _SOCKET_CALLS:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}")
    architecture, socket, socketpair = _SOCKET_CALLS[machine]
    program = (  # operation, instructions to skip if true, if false, operand
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
    """``program`` with the placeholder of ``only_own_signals`` replaced by ``pid``."""
    return program.replace(struct.pack("=I", _OWN_PID), struct.pack("=I", pid))
