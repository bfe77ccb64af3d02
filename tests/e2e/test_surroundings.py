"""What a library prints at exit goes to the log."""

import subprocess
import sys
from pathlib import Path


def test_what_a_library_says_at_exit_goes_to_the_log(tmp_path: Path):
    code = (
        "import ctypes, sys; from pathlib import Path; from retool_mcore.process import redirect_output\n"
        "libc = ctypes.CDLL(None)\n"
        "import atexit; atexit.register(lambda: libc.dprintf(2, b'leaked\\n'))\n"
        "with redirect_output(Path(sys.argv[1])): pass\n"
        "print('error: told', file=sys.stderr)"
    )
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", code, log], capture_output=True, text=True, check=True)
    assert (done.stderr, log.read_text()) == ("error: told\n", "leaked\n")
