"""SFT's loop without a model: in which order it trains, validates and saves, and what it writes."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from retool_mcore.platforms import get_platform
from retool_mcore.run.signals import EndedBySignal
from retool_mcore.train import sft
from tests.unit.run.test_checkpoints import run_in, steps, write_model

TWO = ("validation.every=2", "checkpoint.every_steps=2")
BEST = (*TWO, "best.metric=val_loss", "best.patience=[1, 0]")
NONE = ("validation.every=0", "checkpoint.every_steps=0", "checkpoint.export=false")
SECOND = ["train 1", "train 2", "validate held out", "save 2"]
THEN = ["train 3", "train 4", "validate held out", "save 4"]


@pytest.mark.parametrize(
    ("settings", "resumed", "signal_in", "calls", "kept"),
    [
        (TWO, 0, 0, [*SECOND, *THEN, "train 5", "validate held out", "save 5"], ""),
        (TWO, 0, 3, [*SECOND, "train 3", "save 3"], "step 3 is saved"),
        (TWO, 0, 4, [*SECOND, "train 3", "train 4", "save 4", "validate held out"], "step 4 is saved"),
        (NONE, 0, 1, ["train 1"], "no checkpoint is kept"),
        (BEST, 0, 0, [*SECOND, *THEN], ""),  # the losses rise, and its patience is exhausted
        (BEST, 2, 0, ["load step 2", "validate held out", *THEN], ""),  # a kill took the validation of step 2
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_order_of_a_run_of_five_steps_and_its_rows(
    *, settings: tuple[str, ...], resumed: int, signal_in: int, calls: list[str], kept: str, rank: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    config = run_in(tmp_path, "train.steps=5", "run.trackers=[]", "checkpoint.keep=9", *settings)
    config.run.dir.mkdir(parents=True)
    metrics_file = config.run.dir / "metrics.jsonl"
    metrics_file.write_text("".join(json.dumps({"step": step, "loss": 9}) + "\n" for step in (1, 2, 3)))
    found, shown = list[str](), list[int]()

    def did(*words: object) -> None:
        found.append(" ".join(map(str, words)))

    engine: Any = SimpleNamespace(load=partial(did, "load"))
    engine.train_batch = lambda step: did("train", step) or {"loss": float(step), "perf/total_num_tokens": 8.0}
    engine.validation_loss = lambda batches: did("validate", batches) or float(len(found))
    engine.save = lambda folder, step: did("save", step) or write_model(folder, step)
    saved = SimpleNamespace(step=resumed, path=f"step {resumed}") if resumed else None
    monkeypatch.setattr(sft, "_prepare", lambda *_, **__: (saved, engine, lambda step: step, "held out"))
    monkeypatch.setattr(sft, "progress", lambda *_: nullcontext(shown.append))
    monkeypatch.setattr(sft.dist, "barrier", lambda: None)
    monkeypatch.setattr(sft, "_signal_of_any_rank", lambda own: 10 * (f"train {signal_in}" in found))
    with pytest.raises(EndedBySignal, match="143") if kept else nullcontext() as ended:
        sft._run(config, get_platform("cpu"), rank, Console(quiet=True))
    assert found == calls and shown == [resumed] * (rank == 0)
    lines = map(json.loads, metrics_file.read_text().splitlines())
    rows = [(row["step"], row["loss"]) for row in lines if "loss" in row]  # a validation has its own row
    trained = [int(call.removeprefix("train ")) for call in calls if call.startswith("train ")]
    kept_rows = range(1, resumed + 1 if rank == 0 else 4)  # another rank writes nothing
    assert rows == [*((step, 9) for step in kept_rows), *((step, step) for step in trained if rank == 0)]
    published = [int(call.removeprefix("save ")) for call in calls if call.startswith("save ")]
    assert steps(config) == (published if rank == 0 else [])
    assert (config.run.dir / "best.json").exists() == (settings is BEST and rank == 0)
    if rank == 0 and ended is not None:
        assert kept in ended.value.message
