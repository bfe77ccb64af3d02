"""Broken pipes, full disks, limits of the machine, a failing Hub and Ctrl-C: one line each."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.preflight.test_limits import SFT
from tests.unit.test_mistakes import RL, ROOT, RUN, folder, no_stage_lasts  # noqa: F401  fixtures


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("--help > /dev/full", 2, "error: no space is left. Complete files are kept"),
        (f"get {RL} run.name > /dev/full", 2, "error: no space is left. Complete files are kept"),
        ("parse < /dev/null <&-", 2, "error: standard input is closed, but the turn is read from it."),
        (f"get {RL} run.name | true", 0, ""),
        (f"runs {ROOT}/tests/report/view >&- 2>&-", 0, ""),
    ],
)
def test_closed_and_full_ends_of_a_pipe_leave_no_traceback(command: str, code: int, message: str):
    line = f"{sys.executable} -m retool_mcore {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr.strip()[: len(message)]) == (code, message), done.stderr
    assert done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize("encoding, written", [("ascii", "utf-8"), ("latin-1", "latin-1")])
def test_a_terminal_of_another_encoding_gets_a_mark_and_no_traceback(encoding: str, written: str, folder: Path):
    """click takes ASCII for a locale that nobody has set, and writes UTF-8 there."""
    argv = [sys.executable, "-m", "retool_mcore", "get", str(RL), "run.root", "run.root=größe…"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(argv, capture_output=True, check=False, timeout=300, env=environment)
    message = "größe…".encode(written, errors="replace") + b"\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, message, b"")


@pytest.mark.parametrize("words", ["data task made", f"view {RUN} --out page.html"])
def test_a_limit_of_a_files_size_is_one_line(words: str, tmp_path: Path):
    """The weights' writer has an error of its own for it, and Python another one."""
    line = f"ulimit -f 20; exec {sys.executable} -m retool_mcore {words}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    message = "error: this shell limits the size of files. Remove the limit (ulimit -f unlimited), then run the same "
    assert (done.returncode, done.stderr) == (2, f"{message}command again.\n")


@pytest.mark.parametrize("import_of", ["typer", "retool_mcore.data.tasks"])
def test_ctrl_c_is_one_line_while_modules_are_imported_and_in_a_command(import_of: str, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Now:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {import_of!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Now())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-m", "retool_mcore", "data", "task", str(tmp_path / "task")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode in (130, -signal.SIGINT)
    assert (done.stdout, done.stderr) == ("", "note: ended by SIGINT. Complete files are kept.\n")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("ulimit -n 64", "error: 64 open files are allowed (ulimit -n), but a run needs 512. Raise the limit"),
        ("ulimit -v 2000000", "error: this shell limits the address space of a process to 1.9 GiB (ulimit -v)"),
    ],
)
def test_a_limit_that_would_end_a_start_is_one_line(tmp_path: Path, limits: str, message: str):
    command = f"{limits} && exec {sys.executable} -m retool_mcore sft {SFT} run.root={tmp_path}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path):
    """Node without a network: huggingface_hub would ask six times and print a line for each."""
    settings = ["model.path=Qwen/Qwen3-0.6B", "data.train_file=absent.parquet", 'validation.files=["absent.parquet"]']
    argv = [sys.executable, "-m", "retool_mcore", "sft", "configs/sft_tiny_cpu.toml", *settings]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 2 and "Retrying" not in done.stderr, done.stderr
    assert "Connection refused" in done.stderr and "hf download Qwen/Qwen3-0.6B" in " ".join(done.stderr.split())
