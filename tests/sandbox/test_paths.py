"""/tmp and /dev/shm by name, at landlock: as a link to the working directory would lead."""

import pytest

from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import UNLED

PROGRAMS = {
    "write and read": ("open('/tmp/x', 'w').write('1'); print(open('/tmp/x').read(), open('x').read())", "1 1\n"),
    "keywords": (
        "import os\nopen(file='/dev/shm/x', mode='w').close()\nprint(os.stat(path='/dev/shm/x').st_size)",
        "0\n",
    ),
    "pathlib": (
        "from pathlib import Path\np = Path('/tmp/a/b'); p.mkdir(parents=True); (p / 'c').write_text('é')\n"
        "print((p / 'c').read_text(), p.exists(), sorted(Path('/tmp/a').rglob('*')) != [])",
        "é True True\n",
    ),
    "moving": (
        "import os, shutil\nopen('/tmp/x', 'w').close(); os.rename('/tmp/x', '/tmp/y'); shutil.copy('/tmp/y', 'z')\n"
        "os.symlink('y', '/tmp/l'); os.replace(src='/tmp/y', dst='/dev/shm/q')\n"
        "print(sorted(os.listdir('/tmp')), os.listdir('/dev/shm') == os.listdir('.'), os.readlink('/tmp/l'))",
        "['l', 'q', 'z'] True y\n",
    ),
    "walking": (
        "import glob, os, shutil\nos.makedirs('/tmp/d/e'); open('/tmp/d/e/f', 'w').close()\n"
        "print(glob.glob('/tmp/d/*/f'), len(list(os.walk('/tmp/d')))); shutil.rmtree('/tmp/d')\n"
        "os.chdir('/tmp'); print(os.listdir())",
        "['/tmp/d/e/f'] 2\n[]\n",
    ),
    "tempfile in /tmp": (
        "import tempfile, os\nf = tempfile.NamedTemporaryFile(dir='/tmp'); print(f.name[:5], os.path.exists(f.name))",
        "/tmp/ True\n",
    ),
    "compressed": (
        "import bz2, gzip, lzma\nfor m in bz2, gzip, lzma:\n with m.open('/tmp/x', 'wb') as f: f.write(b'ab')\n"
        " print(m.open('/tmp/x').read())",
        "b'ab'\n" * 3,
    ),
    "arrays": (
        "import numpy as np\nnp.save('/tmp/a.npy', np.arange(3)); np.savetxt('/tmp/a.txt', np.arange(2))\n"
        "print(np.load('/tmp/a.npy'), np.loadtxt('/tmp/a.txt'))",
        "[0 1 2] [0. 1.]\n",
    ),
    "the working directory by its path": (
        "import os, tempfile\nopen('x', 'w').write('1'); print(open(os.path.abspath('x')).read())\n"
        "with tempfile.NamedTemporaryFile() as f: print(os.path.dirname(f.name) == os.getcwd())",
        "1\nTrue\n",
    ),
    "a missing file is named as it was asked for": (
        "import os\nfor call in open, os.listdir, lambda p: os.rename(p, '/tmp/other'):\n try: call('/tmp/none')\n"
        " except FileNotFoundError as error: print(error)",
        "[Errno 2] No such file or directory: '/tmp/none'\n" * 2
        + "[Errno 2] No such file or directory: '/tmp/none' -> '/tmp/other'\n",
    ),
    "names that only begin alike": (
        "import os\nfor p in '/tmpx', '/dev/shmem':\n try: open(p, 'w')\n"
        " except OSError as error: print(error.errno, error.filename)",
        "13 /tmpx\n13 /dev/shmem\n",
    ),
    "what the functions look like": (
        "import inspect, io, os, pickle\n"
        "print(open is io.open, open.__name__, pickle.loads(pickle.dumps(os.stat)) is os.stat,"
        " os.stat in os.supports_dir_fd, 'file' in inspect.signature(open).parameters)",
        "True open True True True\n",
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_shared_names_lead_to_the_working_directory(program: str, landlock: LocalSandbox):
    code, expected = PROGRAMS[program]
    result = await landlock.execute(code)
    assert (result.stdout, result.stderr) == (expected, "")


async def test_nothing_is_left_for_the_next_execution(landlock: LocalSandbox):
    assert (await landlock.execute("open('/tmp/left', 'w').close(); open('/dev/shm/left2', 'w').close()")).ok
    for _ in range(3):
        assert (await landlock.execute("import os; print(os.listdir('/tmp'))")).stdout == "[]\n"


async def test_code_in_c_meets_the_kernels_refusal(landlock: LocalSandbox):
    """The limit that README.md tells: no Python function opens these files."""
    code = "import sqlite3\ntry: sqlite3.connect('/tmp/x.db')\nexcept sqlite3.OperationalError as e: print(e)"
    assert (await landlock.execute(code)).stdout == "unable to open database file\n"
    code = UNLED + "try: open('/tmp/x', 'w')\nexcept PermissionError as error: print(error)"
    assert (await landlock.execute(code)).stdout == "[Errno 13] Permission denied: '/tmp/x'\n"
