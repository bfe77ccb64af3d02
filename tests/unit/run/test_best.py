"""The best checkpoint and early stop: what the values so far decide, what a kill leaves of it."""

import json
import math
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError, RunError
from retool_mcore.run import checkpoint
from retool_mcore.run import export as end
from retool_mcore.run.checkpoint import BestKeeper, BestStep, best_so_far, lacks_value
from retool_mcore.run.export import export, find_weights
from tests.unit.run.test_checkpoints import save, steps

CONFIGS = Path(__file__).parents[3] / "configs"
GOAL = ("best.metric=val_loss", "validation.every=10", "checkpoint.every_steps=10", "checkpoint.keep=1")


def run_in(tmp_path: Path, *overrides: str) -> SftConfig:
    return load_config(SftConfig, CONFIGS / "sft_tiny_cpu.toml", [f"run.root={tmp_path}", *GOAL, *overrides])


def keeper_of(config: SftConfig, losses: dict[int, float], *, saved: bool = False) -> BestKeeper:
    """The record of a run that was validated, and ``saved``, at these steps."""
    keeper = BestKeeper(config, 0)
    for step, loss in losses.items():
        keeper.record_validation(step, {"val_loss": loss})
        if saved:
            save(config, step)
    return keeper


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("losses", "delta", "waited"),
    [
        ([3.0, 2.0, 1.0], 0.0, 0),
        ([3.0, 3.0, 3.0], 0.0, 2),
        ([1.0, 2.0, 0.5, 0.6, 0.7], 0.0, 2),
        ([1.0, 0.95, 0.90, 0.85], 0.1, 0),  # the small gains add up: 0.85 is better than 1.0 by 0.15
        ([1.0, 0.95, 0.92], 0.1, 2),
    ],
)
def test_patience_counts_validations_since_the_last_real_gain(
    losses: list[float], delta: float, waited: int, mode: str
):
    sign = 1 if mode == "min" else -1
    values = {10 * number: sign * loss for number, loss in enumerate(losses, start=1)}
    best = BestStep(metric="val_loss", mode=mode, patience=2, min_delta=delta, values=values)
    assert (best.waited, best.stopped_early) == (waited, waited >= 2)
    assert best.step() == 10 * (1 + losses.index(min(losses))), "the first of equal ones, and any gain counts"


def test_the_best_checkpoint_outlives_newer_ones_until_a_better_one_is_complete(tmp_path: Path):
    config = run_in(tmp_path)
    keeper = BestKeeper(config, 0)
    for step, loss, kept in ((10, 3.0, [10]), (20, 1.0, [20]), (30, 2.0, [20, 30]), (40, 2.0, [20, 40])):
        keeper.record_validation(step, {"val_loss": loss})
        save(config, step)
        assert steps(config) == kept
    keeper.record_validation(50, {"val_loss": 0.5})  # its save is not complete: a kill may take it
    (config.run.dir / "checkpoints/global_step_50").mkdir()
    save(config, 45)
    assert steps(config) == [20, 45]
    assert best_so_far(config, 45).step() == 20  # type: ignore[union-attr]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint_and_nothing_else(tmp_path: Path):
    config = run_in(tmp_path, "best.patience=[2, 0.25]")
    keeper_of(config, {10: 1.0, 20: 2.0, 30: 0.5})
    resumed = BestKeeper(config, 20)
    assert resumed.metrics() == {"best/step": 10.0, "best/value": 1.0, "best/waited": 1.0}
    assert not resumed.stopped_early
    resumed.record_validation(30, {"val_loss": 0.875})  # a gain below the least one
    assert resumed.stopped_early and BestKeeper(config, 30).stopped_early
    on_disk = json.loads((config.run.dir / "best.json").read_text())
    assert (on_disk["metric"], on_disk["step"], on_disk["value"], on_disk["waited"]) == ("val_loss", 30, 0.875, 2)
    assert on_disk["ended_early"] and [path.name for path in config.run.dir.iterdir()] == ["best.json"]
    assert not BestKeeper(run_in(tmp_path, "best.patience=[3, 0.25]"), 30).stopped_early, "the settings of now decide"


def test_what_a_kill_took_is_known_to_be_missing(tmp_path: Path):
    config = run_in(tmp_path, "train.steps=25", "validation.every=10")
    keeper_of(config, {10: 1.0})
    assert [step for step in range(26) if lacks_value(config, step)] == [20, 25]
    without = load_config(SftConfig, CONFIGS / "sft_tiny_cpu.toml", [f"run.root={tmp_path}"])
    assert not any(lacks_value(without, step) for step in range(0, 201, 50))
    save(config, 25)
    assert not checkpoint.is_finished(config), "its last validation is missing"
    BestKeeper(config, 25).record_validation(25, {"val_loss": 2.0})
    assert checkpoint.is_finished(config)
    longer = run_in(tmp_path, "train.steps=100"), run_in(tmp_path, "train.steps=100", "best.patience=[1, 0]")
    never = run_in(tmp_path, "train.steps=25", "checkpoint.resume=never")
    assert [*map(checkpoint.is_finished, (*longer, never))] == [False, True, False]


def test_a_value_that_cannot_be_compared_ends_the_run_and_says_what_there_is(tmp_path: Path):
    config = run_in(tmp_path)
    keeper = keeper_of(config, {15: 1.0})  # no validation is due at this step, so none is recorded or missed
    keeper.record_validation(15, {})
    with pytest.raises(RunError, match=r"val_loss = nan at step 10"):
        keeper.record_validation(10, {"val_loss": math.nan})
    with pytest.raises(RunError, match=r"There are: val/a, val/b\."):
        keeper.record_validation(10, {"val/b": 1.0, "val/a": 1.0, "loss": 2.0})
    assert keeper.metrics() == {}
    keeper.record_validation(10, {"val_loss": 1.0})
    with pytest.raises(CheckpointError, match=r"has the values of val_loss \(min\), but .* \(max\)"):
        BestKeeper(run_in(tmp_path, "best.metric=max val_loss"), 10)
    (config.run.dir / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a valid record of a run's best checkpoint"):
        BestKeeper(config, 10)


def test_the_best_checkpoint_is_exported_by_name(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        find_weights(config.run.dir, "best")
    keeper_of(config, {10: 1.0, 20: 2.0, 30: 2.0, 40: 2.0}, saved=True)
    for which, step in (("best", 10), ("newest", 40), ("30", 30)):
        assert json.loads((find_weights(config.run.dir, which) / "config.json").read_text())["step"] == step
    of_30 = find_weights(checkpoint.step_folder(config, 30))
    assert of_30 == find_weights(config.run.dir, "30"), "a checkpoint's folder is taken, too"
    for which, message in (("20", r"step 20\. There are: 10, 30, 40"), ("worst", "'worst' is not a checkpoint")):
        with pytest.raises(CheckpointError, match=message):
            export(config.run.dir, tmp_path / "out", which)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("val/accuracy", "max"),
        ("val/groups/all_wrong", "min"),
        ("min val/accuracy", "min"),
        ("min val/behavior/turns", "min"),
        ("val-core/aime_2024/x/acc/mean@8", "max"),  # a data_source may have slashes
    ],
)
def test_the_mode_follows_from_the_name_unless_it_is_named(metric: str, mode: str):
    assert load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", [f"best.metric={metric}"]).best_mode == mode


def test_a_run_that_stopped_early_prints_why_and_exports_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(end, "exit_on_sigterm", lambda: None)  # pytest has its own handlers
    config = run_in(tmp_path, "best.patience=[1, 0]")
    keeper_of(config, {10: 2.0, 20: 1.0, 30: 3.0}, saved=True)
    (config.run.dir / "metrics.jsonl").write_text('{"step": 30, "val_loss": 3}\n{"step": 31}\n')
    end.finish(config)
    assert json.loads((config.run.dir / "export" / "config.json").read_text())["step"] == 20
    run = config.run.dir
    assert capsys.readouterr().err.splitlines() == [
        "note: best val_loss 1 at step 20, no improvement in 1 validation",
        f"exported {run}/export: best val_loss 1 at step 20, no improvement in 1 validation",
        "validation at step 30: val_loss 3.0000",
        f"next: retool report {run} --out {run}/report.html",
        f"      retool rl CONFIG model.path={run}/export",
    ]
