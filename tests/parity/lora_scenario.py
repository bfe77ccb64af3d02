"""Run by test_sft_lora.py in its own process: SFT's engine with adapters on one rank.

Saved and resumed. Prints one JSON object.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import CheckpointError
from tests.parity.sft_scenario import BATCH, SETTINGS, make_engine
from tests.scenario import print_as_one_rank

ADAPTERS = ("lora.rank=4", "lora.alpha=8", "lora.dropout=0.2")
ADAPTERS += ("optim.lr=0.02", "optim.min_lr=0.02", "optim.warmup_fraction=0.0")


def found(folder: Path) -> dict[str, Any]:
    from retool_mcore.verl.checkpoint import load_checkpoint

    for seed, name in enumerate(("model", "other")):
        write_model(folder / name, build_tokenizer(tokenizer_rows()), seed=seed)

    engine_of = partial(make_engine, folder, (*SETTINGS, *ADAPTERS))

    def steps(engine: Any, count: int) -> list[float]:
        return [engine.train_batch(BATCH)["loss"] for _ in range(count)]

    saved, asynchronous_save = folder / "saved", folder / "asynchronous"
    engine = engine_of()
    out: dict[str, Any] = {"before": engine.validation_loss([BATCH]), "first": steps(engine, 3)}
    engine.save(str(saved), 3)
    out["later"] = steps(engine, 3)
    out["adapter"] = json.loads((saved / "model/huggingface/adapter_config.json").read_text())
    files = [path for path in saved.rglob("*") if path.is_file()]
    out["files"] = {str(path.relative_to(saved)): path.stat().st_size for path in files}
    asynchronous = engine_of("checkpoint.asynchronous=true")
    load_checkpoint(asynchronous.worker.engine, str(saved))
    out["resumed"] = steps(asynchronous, 1)
    pending = asynchronous.save(str(asynchronous_save), 4)
    out["resumed"] += steps(asynchronous, 2)
    assert pending is not None
    pending.finish()
    again = engine_of()
    load_checkpoint(again.worker.engine, str(asynchronous_save))
    out["resumed_again"] = steps(again, 2)
    try:
        load_checkpoint(engine_of(model="other").worker.engine, str(saved))
    except CheckpointError as error:
        out["other"] = str(error)
    return {**out, "learnt": steps(engine_of("lora.dropout=0.0"), 25)}


if __name__ == "__main__":
    print_as_one_rank(found)
