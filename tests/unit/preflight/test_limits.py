"""What a shell's limits and a folder's rights do not allow is one line, before anything starts."""

import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import SftConfig, load_config
from retool_mcore.platforms.base import get_platform
from retool_mcore.preflight import limits
from retool_mcore.preflight.limits import address_space_problem, require_limits

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


def test_a_low_limit_of_files_is_raised_where_its_owner_may(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        require_limits(load_config(SftConfig, SFT, [f"run.root={tmp_path}"]))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("user", "limit", "message"),
    [
        (0, (100, 100), ""),
        (
            1000,
            (100, 100),
            "100 processes and threads are allowed (ulimit -u), but a run needs 1024. Raise the limit of",
        ),
        (1000, (100, 4096), ""),
        (1000, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), ""),
    ],
)
def test_too_few_threads_are_told_to_whom_the_limit_holds(
    user: int, limit: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
):
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(limits.os, "geteuid", lambda: user)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: limit)
    monkeypatch.setattr(limits.resource, "setrlimit", lambda which, both: raised.append(both))
    said = limits.ensure_threads()
    assert said.startswith(message) and bool(said) == bool(message)
    assert raised == ([(1024, 4096)] if limit == (100, 4096) else [])
