"""The report of --dry-run. Its errors are in tests/e2e."""

import pytest

from retool_mcore.config import SftConfig, load_config
from retool_mcore.train import dry_run


def test_a_report_lists_the_devices_notes_raw_keys_and_what_differs_from_verls_defaults(
    monkeypatch: pytest.MonkeyPatch, verl_on_cpu: None
):
    monkeypatch.setattr(dry_run, "check", lambda config, scope: ["a problem"])
    monkeypatch.setattr(dry_run, "require", lambda problems: [f"of {problems[0]}"])
    words = ["cluster.nodes=3", "train.global_batch=36", f"verl_overrides.optim.optimizer={'x' * 130}"]
    report = dry_run.dry_run(load_config(SftConfig, "configs/sft_tiny_cpu.toml", words))
    head, note, raw, count, *lines = report.splitlines()
    assert head == "# configs/sft_tiny_cpu.toml: SFT on platform cpu, 3 x 2 devices. Nothing was started."
    assert [note, raw] == ["# note: of a problem", f"# raw verl key, [verl_overrides]: optim.optimizer = '{'x' * 130}'"]
    assert count == f"# {len(lines)} settings differ from verl's defaults:" and len(lines) > 5
    assert f"optim.optimizer: adam -> {'x' * 117}..." in lines and "engine.dtype: bfloat16 -> float32" in lines
