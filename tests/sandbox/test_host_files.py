"""Host files keep their content, length, mode and times, with old and new Landlock ABIs.

Landlock restricts neither modes nor times, and truncation only from ABI 3 on. The system-call
filter does the rest. To simulate an older kernel, the test reports an older ABI to the sandbox,
which then uses no newer right.
"""

import os

import pytest

from tests.sandbox.ordinary import UID, OrdinaryUser

ATTACKED = """
import asyncio, os, sys
from retool_mcore.sandbox.supervisor import kernel
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
level, abi, library = Level(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if level == Level.LANDLOCK:
    real = kernel.landlock_abi()
    kernel.landlock_abi = lambda: min(abi, real)
CODE = '''
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, attack):
    try: attack()
    except (OSError, NotImplementedError): return  # the latter from lchmod, which glibc does with /proc
    if name: print(name)
for path in FILES:
    attempt("chmod", lambda: os.chmod(path, 0))
    attempt("lchmod", lambda: os.chmod(path, 0, follow_symlinks=False))
    attempt("", lambda: libc.syscall(452, -100, path.encode(), 0, 0))
    attempt("utime", lambda: os.utime(path, (1, 1)))
    attempt("truncate", lambda: os.truncate(path, 0))
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
        attempt("", lambda: os.open(path, flags | os.O_TRUNC))
    attempt("", lambda: libc.creat(path.encode(), 0o600))
    attempt("", lambda: libc.syscall(437, -100, path.encode(), (ctypes.c_uint64 * 3)(os.O_TRUNC, 0, 0), 24))
    attempt("write", lambda: open(path, "r+b").write(b"x"))
    attempt("unlink", lambda: os.unlink(path))
    attempt("rename", lambda: os.rename(path, "stolen"))
    attempt("chown", lambda: os.chown(path, os.getuid(), os.getgid()))
    attempt("setxattr", lambda: os.setxattr(path, "user.x", b"x"))
    for flags in (os.O_RDONLY, os.O_ACCMODE, os.O_PATH):
        try: fd = os.open(path, flags)
        except OSError: continue
        attempt("fchmod", lambda: os.chmod(fd, 0))
        attempt("chmod of /proc/self/fd", lambda: os.chmod(f"/proc/self/fd/{fd}", 0))
        attempt("futimens", lambda: os.utime(fd, (1, 1)))
        attempt("ftruncate", lambda: os.ftruncate(fd, 0))
attempt("mkdir", lambda: os.mkdir(os.path.dirname(FILES[0]) + "/new"))
'''
OWN = '''
import os, shutil
open("a", "w").write("12345")
with open("a", "r+") as file: file.truncate(3)
open("b", "w").write("x" * 9); open("b", "w").write("y"); open("b", "ab").write(b"z")
shutil.copy("a", "c"); shutil.copy2("b", "d"); shutil.copytree(".", "e/f")
print(open("c").read(), open("d").read(), sorted(os.listdir("e/f")))
'''
def state(path):
    status = os.stat(path)
    return open(path).read(), status.st_mode, int(status.st_mtime), status.st_uid
async def main():
    host = os.path.abspath("checkpoint")
    open(host, "w").write("weights")
    os.chmod(host, 0o666)
    before = [state(path) for path in (host, library)]
    async with LocalSandbox(min_level=level, max_level=level, workers=1) as sandbox:
        result = await sandbox.execute(f"FILES = {[host, library]!r}\\n{CODE}")
        own = await sandbox.execute(OWN)
    print("changed:", result.text, [state(path) for path in (host, library)] != before, os.path.exists("new"))
    print("own:", own.text)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to give a file to a user")
@pytest.mark.parametrize("level, abi", [("namespaces", 0), *(("landlock", abi) for abi in (1, 2, 3, 5, 99))])
@pytest.mark.parametrize("as_root", [False, True], ids=["user", "root"])
def test_nothing_on_the_host_is_changed(level: str, abi: int, as_root: bool, ordinary_user: OrdinaryUser):
    """One file is in site-packages and is the user's, as in a trainer's virtual environment."""
    (site_packages,) = (ordinary_user.home / "venv/lib").glob("python*/site-packages")
    library = site_packages / "library_of_the_user.py"
    library.write_text("X = 1\n")
    library.chmod(0o644)
    os.chown(library, UID, UID)
    done = ordinary_user.run(ATTACKED, level, str(abi), str(library), as_root=as_root)
    assert done.stdout == "changed:  False False\nown: 123 yz ['a', 'b', 'c', 'd']\n", done.stdout + done.stderr
