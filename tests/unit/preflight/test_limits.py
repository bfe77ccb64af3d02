"""Limits of the shell, permissions of a folder and long names are errors before a run starts."""

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.platforms.base import get_platform
from retool_mcore.preflight import limits
from retool_mcore.preflight.limits import (
    MANAGER,
    RAY,
    address_space_problem,
    ensure_open_files,
    ensure_threads,
    sockets,
)

CONFIGS = Path(__file__).parents[3] / "configs"
SFT, RL = CONFIGS / "sft_tiny_cpu.toml", CONFIGS / "rl_tiny_cpu.toml"


@pytest.mark.parametrize(
    ("platform", "gib", "message"), [("cpu", 7, "map 8"), ("cpu", 9, ""), ("cuda", 9, "map 32"), ("ascend", 33, "")]
)
def test_addresses_are_what_the_platforms_libraries_map(
    platform: str, gib: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (gib * 2**30, resource.RLIM_INFINITY))
    said = address_space_problem(get_platform(platform))
    assert message in said and bool(said) == bool(message)


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


def too_long(config: RunConfig) -> list[str]:
    return [finding.text for finding in sockets(config) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("kind", "name", "length", "library"),
    [
        (SftConfig, "TMPDIR", 107 - len(MANAGER), ""),
        (SftConfig, "TMPDIR", 107 - len(MANAGER) + 1, "multiprocessing"),
        (SftConfig, "RAY_TMPDIR", 90, ""),
        (RlConfig, "TMPDIR", 107 - len(RAY), ""),
        (RlConfig, "TMPDIR", 107 - len(RAY) + 1, "Ray"),
        (RlConfig, "RAY_TMPDIR", 107 - len(RAY) + 1, "Ray"),
    ],
)
def test_a_folder_must_leave_room_for_the_names_of_sockets(
    kind: type[RunConfig], name: str, length: int, library: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")  # which RAY_TMPDIR comes before
    monkeypatch.setenv(name, "/tmp/".ljust(length, "x"))
    monkeypatch.setattr(tempfile, "tempdir", os.environ["TMPDIR"])
    found = too_long(load_config(kind, RL if kind is RlConfig else SFT))
    assert len(found) == bool(library), found
    assert all(text.startswith(f"{name} = ") and f": {library} creates sockets" in text for text in found)


def test_ray_has_room_up_to_that_length():
    assert len(MANAGER) == len("/pymp-12345678/listener-12345678"), "as multiprocessing names them"
    from ray._private.utils import validate_socket_filepath

    validate_socket_filepath("/" + "t" * (107 - len(RAY) - 1) + RAY)
    with pytest.raises(OSError, match="AF_UNIX path length"):
        validate_socket_filepath("/" + "t" * (107 - len(RAY)) + RAY)


def test_the_sandboxs_socket_counts():
    long = "/tmp/" + "s" * 103
    for path, count in ((long[:-1], 0), (long, 1)):
        found = too_long(load_config(RlConfig, RL, [f'sandbox.where=["unix://{path}"]']))
        assert len(found) == count and all("108 bytes" in text for text in found)
