"""A dry run and a start refuse a protocol before they read any weight."""

from pathlib import Path

import pytest

from retool_mcore.errors import CheckpointError
from retool_mcore.train import sft
from tests.unit.preflight.test_preflight import command
from tests.unit.preflight.test_protocols import SFT, run_of, settings, task  # noqa: F401  a fixture


@pytest.mark.long
def test_a_dry_run_refuses_and_so_does_the_start_before_any_weight_is_read(task: Path, monkeypatch: pytest.MonkeyPatch):
    done = command("sft", str(SFT), *settings(task, "plain"), "--dry-run")
    assert done.returncode == 2 and "It supports retool" in done.stderr and "Traceback" not in done.stderr

    def worker(*_: object) -> None:
        raise AssertionError("weights were read before the rows were judged")

    from retool_mcore.verl import sft_engine

    monkeypatch.setattr(sft_engine, "megatron_worker", worker)
    monkeypatch.setattr(sft, "_resume", lambda *_: None)  # asks the other ranks
    run = run_of(task, "plain")
    with pytest.raises(CheckpointError, match="It supports retool"):
        sft._loop(run, None, 0, None)  # type: ignore[arg-type]
