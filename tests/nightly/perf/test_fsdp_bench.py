"""The comparison with FSDP2 trains its peer; a peer that does not learn is an error."""

import os
from pathlib import Path

import pytest
import torch

from retool_mcore.errors import ConfigError
from tests.scenario import ROOT, run_scenario


@pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
def test_the_peer_steps_its_schedule_and_its_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "perf"), prepend=os.pathsep)
    rows = run_scenario("tests.nightly.perf.fsdp_scenario", tmp_path)
    assert rows[0]["lr"] > 0 and len({row["lr"] for row in rows}) > 1
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


def test_a_peer_whose_loss_does_not_fall_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    from fsdp_bench import require_training

    require_training([{"loss": 12.64}, {"loss": 11.9}])
    for last in (12.64, float("nan")):
        with pytest.raises(ConfigError, match=r"went from 12\.64 to .* in 2 steps, so it did not train"):
            require_training([{"loss": 12.64}, {"loss": last}])
