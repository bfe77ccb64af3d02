"""What differs from the defaults is told, and nothing else."""

from pathlib import Path
from typing import Any

from retool_mcore.config.reference import reference
from retool_mcore.report.facts import UNKNOWN, changed_settings
from retool_mcore.report.record import read_run
from tests.unit.report.generated import QUICKSTART, write_run


def test_a_real_runs_changes_are_those_that_its_file_makes():
    found = {setting.key: setting for setting in changed_settings([read_run(QUICKSTART / "tool_rl")])}
    assert found["run.root"].values == ('"runs/quickstart"',) and found["run.root"].default == '"runs"'
    assert found["model.path"].default == "required" and not found["model.path"].has_default
    defaults = {entry.key: entry.default for entry in reference(("rl",)) if entry.kind}
    assert all(setting.values[0] != defaults[key] for key, setting in found.items())
    assert "optim.betas" not in found and "parallel.tp" not in found and "verl_overrides" not in found


def test_a_default_that_is_another_keys_value_is_compared_with_that(tmp_path: Path):
    same = {"rollout": {"temperature": 0.6}, "validation": {"temperature": 0.6}}
    assert "validation.temperature" not in _changed(tmp_path / "same", **same)
    other = {"rollout": {"temperature": 0.6}, "validation": {"temperature": 1.0}}
    assert _changed(tmp_path / "other", **other)["validation.temperature"] == "1.0"


def test_a_key_of_another_version_is_shown_as_unknown(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", model={"attic": "megatron"}))
    found = {setting.key: setting for setting in changed_settings([run])}
    assert found["model.attic"].default == UNKNOWN and found["model.attic"].values == ('"megatron"',)


def test_raw_keys_of_verl_are_shown(tmp_path: Path):
    changed = _changed(tmp_path / "run", verl_overrides={"actor.x": 1})
    assert changed["verl_overrides"] == '{"actor.x": 1}'


def test_of_two_runs_a_key_stands_there_if_one_changes_it(tmp_path: Path):
    one = read_run(write_run(tmp_path / "one", optim={"lr": 1e-3, "betas": [0.9, 0.999]}))
    two = read_run(write_run(tmp_path / "two", kind="sft", optim={"lr": 1e-3, "betas": [0.8, 0.999]}))
    found = {setting.key: setting for setting in changed_settings([one, two])}
    assert found["optim.betas"].values == ("[0.9, 0.999]", "[0.8, 0.999]") and found["optim.betas"].differs_between_runs
    assert not found["optim.lr"].differs_between_runs


def _changed(folder: Path, **sections: Any) -> dict[str, str]:
    run = read_run(write_run(folder, **sections))
    return {setting.key: setting.values[0] for setting in changed_settings([run])}
