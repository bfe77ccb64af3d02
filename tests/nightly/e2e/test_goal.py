"""Best checkpoint, early stop and curriculum as a user runs them, on the real engines.

The model tosses a coin (coin_model.py), and its training file has so few prompts that the second
epoch begins with the third step.
"""

import json
from pathlib import Path

import pytest

from retool_mcore.data.files import read_rows, write_parquet
from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import argv_rl, succeed

pytestmark = [pytest.mark.timeout(900)]

ROWS, LAST = 8, 6
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def settings(folder: Path) -> tuple[str, ...]:
    task = write_coin_task(folder)
    few = folder / "few.parquet"
    write_parquet(few, [row for _, row in read_rows(folder / "train.parquet", COLUMNS)][:ROWS])
    size = ("train.prompts_per_step=4", "train.mini_batch_prompts=4", "rollout.group_size=2", "validation.n=8")
    every = ("validation.every=1", "checkpoint.every_steps=1", "checkpoint.keep=1", "rollout.record_groups=8")
    # No accuracy is better than another by more than 1: patience counts from the first validation.
    goal = ("best.metric=val-core/coin/acc/mean@8", f"best.patience=[{LAST - 1}, 1.0]")
    return (*task, f"data.train_file={few}", *size, *every, *goal, "data.curriculum=0.125", "optim.lr=1e-3")


def train(root: Path, mark: str, *more: str) -> str:
    done = succeed(argv_rl(f"run.root={root}", *more), mark, timeout_s=400)
    return done.stderr


def prompts_by_step(run_dir: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for line in (run_dir / "trajectories" / "trajectories.jsonl").open():
        row = json.loads(line)
        if row["partition"] == "train":
            found.setdefault(row["step"], set()).add(row["prompt"])
    return found


def test_a_resumed_run_keeps_its_best_step_its_patience_and_its_curriculum(tmp_path: Path, mark: str):
    common = settings(tmp_path)
    stderr = train(tmp_path, mark, *common, "run.name=whole", "train.steps=9")
    assert f"no improvement by more than 1 in {LAST - 1} validations" in stderr
    train(tmp_path, mark, *common, "run.name=cut", "train.steps=3")
    file = tmp_path / "cut" / "best.json"
    record = json.loads(file.read_text())
    [taken] = record["values"][2:]  # as a kill in the validation of step 3 leaves it
    file.write_text(json.dumps(record | {"values": record["values"][:2]}))
    train(tmp_path, mark, *common, "run.name=cut", "train.steps=9")
    whole, cut = (json.loads((tmp_path / name / "best.json").read_text()) for name in ("whole", "cut"))
    assert [each["step"] for each in cut["values"]] == list(range(1, LAST + 1)) and cut["ended_early"]
    assert cut["values"][2] == taken, "validated anew, on the weights of its checkpoint"
    assert cut == whole
    for name in ("whole", "cut"):
        run_dir = tmp_path / name
        rows = read_metrics(run_dir / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, LAST + 1))
        values = {row["step"]: row["val-core/coin/acc/mean@8"] for row in rows}
        assert {each["step"]: each["value"] for each in whole["values"]} == values
        best = max(values, key=lambda step: (values[step], -step))
        assert (rows[-1]["best/step"], rows[-1]["best/waited"]) == (best, LAST - 1)
        assert [saved.step for saved in complete_checkpoints(run_dir / "checkpoints")] == sorted({best, LAST})
        of_best = run_dir / f"checkpoints/global_step_{best}/actor/model/huggingface/model.safetensors"
        assert (run_dir / "export/model.safetensors").read_bytes() == of_best.read_bytes()
        for row in rows:
            counted = [row[f"curriculum/{kind}"] for kind in ("always", "never", "mixed", "unseen")]
            assert sum(counted) == ROWS and row["curriculum/unseen"] == (4 if row["step"] == 1 else 0)
        assert min(row["curriculum/mean_share"] for row in rows) < 1.0
        assert len({frozenset(found) for found in prompts_by_step(run_dir).values()}) > 2, "epochs of other rows"
    assert prompts_by_step(tmp_path / "cut") == prompts_by_step(tmp_path / "whole")
    before = (tmp_path / "cut" / "start.jsonl").read_text()
    stderr = train(tmp_path, mark, *common, "run.name=cut", "train.steps=9")
    assert "no improvement" in stderr and len(before.splitlines()) > 1
    assert len((tmp_path / "cut" / "start.jsonl").read_text().splitlines()) == 1, "started no engine"
