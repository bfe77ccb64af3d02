"""At landlock the names /tmp and /dev/shm lead to the working directory, as a link would."""

import pytest

from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import NOT_REDIRECTED

PROGRAMS = {
    "write and read": ("open('/tmp/x', 'w').write('1'); print(open('/tmp/x').read(), open('x').read())", "1 1\n"),
    "pathlib": (
        "from pathlib import Path\np = Path('/tmp/a/b'); p.mkdir(parents=True); (p / 'c').write_text('é')\n"
        "print((p / 'c').read_text(), p.exists(), sorted(Path('/tmp/a').rglob('*')) != [])",
        "é True True\n",
    ),
    "moving": (
        "import os, shutil\nopen('/tmp/x', 'w').close(); os.rename('/tmp/x', '/tmp/y'); shutil.copy('/tmp/y', 'z')\n"
        "os.replace(src='/tmp/y', dst='/dev/shm/q'); print(sorted(os.listdir('/tmp')))",
        "['q', 'z']\n",
    ),
    "tempfile": (
        "import tempfile, os\nf = tempfile.NamedTemporaryFile(dir='/tmp'); print(f.name[:5], os.path.exists(f.name))\n"
        "with tempfile.NamedTemporaryFile() as f: print(os.path.dirname(f.name) == os.getcwd())",
        "/tmp/ True\nTrue\n",
    ),
    "arrays": (
        "import numpy as np\nnp.save('/tmp/a.npy', np.arange(3)); print(np.load('/tmp/a.npy'))",
        "[0 1 2]\n",
    ),
    "a missing file has the name that the code gave": (
        "try: open('/tmp/none')\nexcept FileNotFoundError as error: print(error)",
        "[Errno 2] No such file or directory: '/tmp/none'\n",
    ),
    "a name that only begins alike": (
        "try: open('/tmpx', 'w')\nexcept OSError as error: print(error.errno, error.filename)",
        "13 /tmpx\n",
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_shared_names_lead_to_the_working_directory(program: str, landlock: LocalSandbox):
    code, expected = PROGRAMS[program]
    result = await landlock.execute(code)
    assert (result.stdout, result.stderr) == (expected, "")


async def test_the_kernel_refuses_the_real_directory(landlock: LocalSandbox):
    code = NOT_REDIRECTED + "try: open('/tmp/x', 'w')\nexcept PermissionError as error: print(error)"
    assert (await landlock.execute(code)).stdout == "[Errno 13] Permission denied: '/tmp/x'\n"
