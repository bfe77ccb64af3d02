"""The last lines of a run: what it has made, how good it is, and what comes next."""

import json
from pathlib import Path

from retool_mcore.config import RlConfig, RunConfig, load_config
from retool_mcore.run.closing import closing_lines
from tests.run.test_checkpoint_files import CONFIGS, run_in, save

RL = CONFIGS / "rl_tiny_cpu.toml"


def ended(config: RunConfig, *rows: dict[str, float]) -> list[str]:
    (config.run.dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(closing_lines(config))


def test_sft_names_its_export_its_validation_and_the_next_command(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 200)
    (config.run.dir / "export").mkdir()
    run = config.run.dir
    assert ended(config, {"step": 150, "val_loss": 0.5}, {"step": 200, "val_loss": 0.25}, {"step": 201}) == [
        f"exported {run}/export, of step 200",
        "validation at step 200: val_loss 0.2500",
        f"next: retool report {run} --out {run}/report.html",
        f"      retool view {run} --out {run}/view.html",
        f"      retool rl CONFIG model.path={run}/export",
    ]


def test_rl_has_the_interval_and_the_best_step(tmp_path: Path):
    best = ("best.metric=val/accuracy", "validation.every=12", "checkpoint.every_steps=12")
    config = load_config(RlConfig, RL, [f"run.root={tmp_path}/a b", *best])
    save(config, 24)  # type: ignore[arg-type]
    (config.run.dir / "export").mkdir()
    values = [{"step": 12, "value": 0.75}, {"step": 24, "value": 0.5}]
    rule = {"metric": "val/accuracy", "mode": "max", "patience": 0, "min_delta": 0.0}
    (config.run.dir / "best.json").write_text(json.dumps({**rule, "values": values}))
    row = {"step": 24, "val/accuracy": 0.5, "val/accuracy/low": 0.4, "val/accuracy/high": 0.6}
    lines, run = ended(config, row), config.run.dir
    assert lines[:2] == [
        f"exported {run}/export: best val/accuracy 0.75 at step 12, not bettered in 1 validation",
        "validation at step 24: accuracy 0.500 (95 %: 0.400 to 0.600)",
    ]
    assert lines[-1] == f"      retool eval '{run}/config.toml' --model '{run}/export' --out '{run}/eval'"


def test_a_run_that_keeps_nothing_names_no_model(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.every_steps=0", "checkpoint.export=false")
    config.run.dir.mkdir(parents=True)
    run = config.run.dir
    assert ended(config) == [
        f"next: retool report {run} --out {run}/report.html",
        f"      retool view {run} --out {run}/view.html",
    ]
