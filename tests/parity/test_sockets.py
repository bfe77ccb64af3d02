"""multiprocessing.Manager starts up to the length of TMPDIR that preflight allows."""

import multiprocessing
from pathlib import Path

import pytest

from retool_mcore.preflight.limits import MANAGER, sockets
from tests.unit.preflight.test_sockets import (
    SFT,
    short,  # noqa: F401  a fixture
    use_folder,
)


def test_a_manager_of_multiprocessing_starts_up_to_that_length_and_no_further(
    short: Path, monkeypatch: pytest.MonkeyPatch
):
    """The effect itself: Megatron starts such a manager in each save."""
    fork = multiprocessing.get_context("fork")
    use_folder(monkeypatch, short, 107 - len(MANAGER))
    assert [each.severity for each in sockets(SFT)] == ["ok"]
    with fork.Manager() as manager:
        assert manager.list([1])[0] == 1
    folder = use_folder(monkeypatch, short, 107 - len(MANAGER) + 1)
    (found,) = sockets(SFT)
    assert found.severity == "error" and f"TMPDIR = {folder} has 76 bytes" in found.text
    assert "at most 75 are allowed" in found.text
    with pytest.raises((EOFError, OSError)), fork.Manager():
        pass
