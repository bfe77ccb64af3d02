"""What a run's processes leave in the temporary folder goes with the run."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from retool_mcore.run.temporary import LONGEST, own_tmpdir
from retool_mcore.sandbox.state import StateDirectory, remove_stale

CHILD = "import tempfile; print(tempfile.mkdtemp())"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The TMPDIR of whoever starts a run; short enough for what is made below it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_what_processes_of_a_run_leave_is_gone_with_it(temporary: Path, tmp_path: Path):
    with own_tmpdir(tmp_path / "run"):
        made = Path(subprocess.check_output([sys.executable, "-c", CHILD], text=True).strip())
        assert made.parent.parent == temporary and Path(tempfile.mkdtemp()).parent == made.parent
        assert made.parent.stat().st_mode & 0o777 == 0o711, "the sandbox's uids pass, and nobody lists it"
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == temporary, "compiled kernels outlive a run"
    assert not list(temporary.iterdir())
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(temporary)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_next_start_removes_what_a_killed_one_left_with_its_sandboxes(temporary: Path, tmp_path: Path):
    killed = "import os, sys; from pathlib import Path; from retool_mcore.run.temporary import own_tmpdir\n"
    killed += "from retool_mcore.sandbox.state import StateDirectory\n"
    killed += f"with own_tmpdir(Path({str(tmp_path)!r})): StateDirectory.create(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    (left,) = temporary.iterdir()
    (box,) = left.iterdir()
    cgroup = Path((box / "cgroup").read_text()) if (box / "cgroup").exists() else None
    with own_tmpdir(tmp_path, clean=partial(remove_stale, young_s=0)):
        assert not box.exists() and left.is_dir()
        assert cgroup is None or not cgroup.exists()


def test_a_sandbox_that_is_held_is_waited_for(temporary: Path):
    held = StateDirectory.create()
    assert not remove_stale(temporary, young_s=0) and held.path.is_dir()
    held.remove()
    assert remove_stale(temporary, young_s=0)


def test_where_sockets_would_have_too_long_a_path_tmpdir_stays(temporary: Path, tmp_path: Path, monkeypatch):
    deep = temporary / ("d" * (LONGEST - len(str(temporary)) - 10))
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with own_tmpdir(tmp_path):
        assert tempfile.gettempdir() == str(deep) and not list(deep.iterdir())


def test_a_folder_of_another_make_is_neither_used_nor_removed(temporary: Path, tmp_path: Path):
    with own_tmpdir(tmp_path):
        name = Path(tempfile.gettempdir()).name
    (temporary / name).symlink_to(tmp_path)
    with own_tmpdir(tmp_path):
        assert tempfile.gettempdir() == str(temporary)
    assert (temporary / name).is_symlink() and tmp_path.is_dir()
