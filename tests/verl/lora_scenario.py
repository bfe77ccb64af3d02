"""Run by test_sft_lora.py in its own process: SFT's engine with adapters on one rank.

Saved and resumed. Prints one JSON object.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from retool_mcore.config import SftConfig, load_config
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import CheckpointError
from retool_mcore.platforms import get_platform
from tests.verl.sft_scenario import BATCH, SETTINGS, SFT

ADAPTERS = ("lora.rank=4", "lora.alpha=8", "lora.dropout=0.2")
ADAPTERS += ("optim.lr=0.02", "optim.min_lr=0.02", "optim.warmup_fraction=0.0")
LEARNT = 25  # updates


def main(folder: Path) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    platform = get_platform("cpu")
    platform.activate()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from retool_mcore.verl.sft_engine import SftEngine, megatron_worker

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for seed, name in enumerate(("model", "other")):
        write_model(folder / name, build_tokenizer(tokenizer_rows()), seed=seed)

    def engine_of(*changes: str, model: str = "model") -> SftEngine:
        parallel_state.destroy_model_parallel()
        settings = [*SETTINGS, *ADAPTERS, f"model.path={folder}/{model}", f"run.root={folder}", *changes]
        config = load_config(SftConfig, SFT, settings)
        return SftEngine(megatron_worker(config, platform), config, platform)

    def steps(engine: SftEngine, count: int) -> list[float]:
        return [engine.train_batch(BATCH)["loss"] for _ in range(count)]

    out: dict[str, Any] = {}
    engine = engine_of()
    out["before"] = engine.validation_loss([BATCH])
    out["first"] = steps(engine, 3)
    engine.save(str(folder / "saved"), 3)
    out["later"] = steps(engine, 3)
    out["files"] = {
        str(path.relative_to(folder / "saved")): path.stat().st_size
        for path in (folder / "saved").rglob("*")
        if path.is_file()
    }
    beside = engine_of("checkpoint.asynchronous=true")
    beside.load(str(folder / "saved"))
    out["resumed"] = steps(beside, 1)
    pending = beside.save(str(folder / "beside"), 4)
    out["resumed"] += steps(beside, 2)
    assert pending is not None
    pending.finish()
    again = engine_of()
    again.load(str(folder / "beside"))
    out["resumed_again"] = steps(again, 2)
    other = engine_of(model="other")
    try:
        other.load(str(folder / "saved"))
    except CheckpointError as error:
        out["other"] = str(error)
    learning = engine_of("lora.dropout=0.0", f"train.steps={LEARNT}")
    out["learnt"] = steps(learning, LEARNT)
    out["flops"] = learning.train_batch(BATCH)["flops"]
    out["vocab"] = learning.shape.vocab
    print(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
