"""Host files keep their content, length, mode and times, with old and new Landlock ABIs.

Landlock restricts neither modes nor times, and truncation only from ABI 3 on. The system-call
filter does the rest. To simulate an older kernel, the test reports an older ABI to the sandbox,
which then uses no newer right.
"""

import pytest

from tests.sandbox.ordinary import OrdinaryUser

ATTACKED = """
import asyncio, json, os, sys
from retool_mcore.sandbox.supervisor import kernel
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
level, abi, library = Level(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if level == Level.LANDLOCK:
    real = kernel.landlock_abi()
    kernel.landlock_abi = lambda: min(abi, real)
CODE = '''
import ctypes, os, shutil
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
    attempt("link", lambda: os.link(path, "linked"))
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
import os, shutil, tempfile
open("a", "w").write("12345")
with open("a", "r+") as file: file.truncate(3)
open("b", "w").write("x" * 9); open("b", "w").write("y"); open("b", "ab").write(b"z")
shutil.copy("a", "c"); shutil.copy2("b", "d"); shutil.copytree(".", "e/f")
with tempfile.TemporaryDirectory() as d: open(d + "/x", "w").close()
print(open("c").read(), open("d").read(), sorted(os.listdir("e/f")))
'''
def state(path):
    status = os.stat(path)
    return open(path).read(), oct(status.st_mode), int(status.st_mtime), status.st_nlink, status.st_uid
async def main():
    os.makedirs("host", exist_ok=True)
    for name in ("checkpoint", "open_to_all"):
        open(f"host/{name}", "w").write("weights")
        os.chmod(f"host/{name}", 0o666 if name == "open_to_all" else 0o644)
    files = [os.path.abspath("host/checkpoint"), os.path.abspath("host/open_to_all"), library]
    before = [state(path) for path in files]
    async with LocalSandbox(min_level=level, max_level=level, workers=1) as sandbox:
        result = await sandbox.execute(f"FILES = {files!r}\\n{CODE}")
        own = await sandbox.execute(OWN)
    unchanged = [state(path) for path in files] == before
    done, new = result.text.split("\\n"), os.path.exists("host/new")
    print(json.dumps({"unchanged": unchanged, "done": done, "new": new, "own": own.text}))
asyncio.run(main())
"""
LANDLOCK_ABIS = [1, 2, 3, 5, 99]  # those that change the rights or the filter, and this kernel's


def own_library(user: OrdinaryUser) -> str:
    """Create a file in site-packages that the user owns, as in a trainer's virtual environment."""
    (site_packages,) = (user.home / "venv/lib").glob("python*/site-packages")
    path = site_packages / "library_of_the_user.py"
    path.write_text("X = 1\n")
    path.chmod(0o644)
    return str(user.give(path))


@pytest.mark.parametrize("level, abi", [("namespaces", 0), *(("landlock", abi) for abi in LANDLOCK_ABIS)])
@pytest.mark.parametrize("as_root", [False, True], ids=["user", "root"])
def test_nothing_on_the_host_is_changed(level: str, abi: int, as_root: bool, ordinary_user: OrdinaryUser):
    result = ordinary_user.run(ATTACKED, level, str(abi), own_library(ordinary_user), as_root=as_root)
    assert '"unchanged": true, "done": [""], "new": false' in result.stdout, result.stdout + result.stderr
    assert """"own": "123 yz ['a', 'b', 'c', 'd']\"""" in result.stdout, result.stdout + result.stderr
