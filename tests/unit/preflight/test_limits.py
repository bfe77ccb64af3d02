"""What a shell's limits and a folder's rights do not allow is one line, before anything starts."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import SftConfig, load_config
from retool_mcore.platforms.base import get_platform
from retool_mcore.preflight import limits
from retool_mcore.preflight.limits import address_space_problem, ensure_open_files, ensure_threads

ROOT = Path(__file__).parents[3]
SFT = ROOT / "configs" / "sft_tiny_cpu.toml"


@pytest.mark.parametrize(
    ("platform", "gib", "message"), [("cpu", 7, "map 8"), ("cpu", 9, ""), ("cuda", 9, "map 32"), ("ascend", 33, "")]
)
def test_addresses_are_what_the_platforms_libraries_map(
    platform: str, gib: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (gib * 2**30, resource.RLIM_INFINITY))
    said = address_space_problem(get_platform(platform))
    assert message in said and bool(said) == bool(message)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder.html", "error: expected a file, found a folder (folder.html). Choose another path."),
        ("file/x.html", "error: expected a folder, found a file (file). Choose another path."),
        ("/proc/x.html", "error: permission denied (/proc/x.html). Choose another path"),
    ],
)
def test_a_place_that_takes_no_file_is_one_line(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    run = ROOT / "tests" / "report" / "quickstart" / "tool_rl"
    result = CliRunner().invoke(all_commands(), ["report", str(run), "--out", out])
    assert result.exit_code == 2 and result.output.splitlines()[-1].startswith(message), result.output


UNLIMITED = resource.RLIM_INFINITY
THREADS = "100 processes and threads are allowed (ulimit -u), but a run needs 1024. "


@pytest.mark.parametrize(
    ("ensure", "user", "limit", "raised", "message"),
    [
        (ensure_threads, 0, (100, 100), None, ""),
        (ensure_threads, 1000, (100, 1023), None, THREADS),
        (ensure_threads, 1000, (100, 1024), (1024, 1024), ""),
        (ensure_threads, 1000, (100, UNLIMITED), (1024, UNLIMITED), ""),
        (ensure_threads, 1000, (1024, 4096), None, ""),
        (ensure_threads, 1000, (UNLIMITED, UNLIMITED), None, ""),
        (ensure_open_files, 0, (100, 511), None, "100 open files are allowed (ulimit -n), but a run needs 512. "),
        (ensure_open_files, 0, (100, 512), (512, 512), ""),
        (ensure_open_files, 0, (100, UNLIMITED), (512, UNLIMITED), ""),
        (ensure_open_files, 0, (512, 4096), None, ""),
    ],
)
def test_a_low_limit_is_raised_or_told_to_whom_it_holds(  # noqa: PLR0917
    ensure: Callable[[], str], user: int, limit: tuple[int, int], raised: tuple[int, int] | None, message: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(limits.os, "geteuid", lambda: user)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: limit)
    monkeypatch.setattr(limits.resource, "setrlimit", lambda which, both: set_to.append(both))
    said = ensure()
    assert said.startswith(message) and bool(said) == bool(message)
    assert set_to == ([raised] if raised else [])


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def problem(root: str) -> str:
        return limits.folder_problem(load_config(SftConfig, SFT, [f"run.root={tmp_path}/{root}"]))

    (tmp_path / "file").write_text("")
    assert problem("new/folder") == ""
    assert problem("file").startswith(f"{tmp_path}/file is not a folder. Set run.root")
    monkeypatch.setattr(limits.os, "access", lambda path, mode: mode != limits.os.W_OK | limits.os.X_OK)
    assert problem("new/folder").startswith(f"{tmp_path} cannot be written. Set run.root")
