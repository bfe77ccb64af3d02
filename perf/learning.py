"""Checks that RL learns the quickstart's task on real devices, in every mode and layout.

    python perf/learning.py OUT [--case sync --case tp2 ...] [--platform cuda]

It runs SFT and then RL on the quickstart's task with the quickstart's numbers of steps, in bfloat16
on GPUs. It reports the accuracy in RL's first step, in its last five steps, and on held-out
problems at the end. Cases run in parallel on different devices. Some cases need another model with
its own SFT: `pp2` needs an even number of layers, `moe_*` experts, `fp8` an SFT in FP8, and
`fp8_engine` larger matrices. OUT/learning.json has the figures, OUT/<case>/ the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
VISIBLE = "CUDA_VISIBLE_DEVICES"
# A small cache, so that several engines fit on one device.
ENGINE = 'rollout.engine_args={attention_backend = "triton", sampling_backend = "pytorch", max_total_tokens = 65536}'
REPLAY = "algorithm.router_replay=R3"


@dataclass(frozen=True)
class Case:
    """An RL run: its model (a name in MODELS), its number of devices, and its settings."""

    model: str
    devices: int
    settings: tuple[str, ...] = ()


CASES = {
    "sync": Case("dense", 1),
    "sync_4_updates": Case("dense", 1, ("train.mini_batch_prompts=3",)),
    "partial_rollout": Case("dense", 1, ("train.mode=partial_rollout",)),
    "async": Case("dense", 2, ("train.mode=async", "rollout.gpus=1")),
    "tp2": Case("dense", 2, ("parallel.tp=2",)),
    "four_layers": Case("four_layers", 1),  # control for pp2: the same model without a pipeline
    "pp2": Case("four_layers", 2, ("parallel.pp=2",)),
    "moe_ep2": Case("experts", 2, ("parallel.ep=2",)),
    "moe_r3": Case("experts", 2, ("parallel.ep=2", REPLAY)),
    "moe_r3_async": Case("experts", 2, ("train.mode=async", "rollout.gpus=1", REPLAY)),
    "fp8": Case("fp8", 1, ("model.fp8=tensorwise", "algorithm.importance_sampling=token")),
    "blocks": Case("blocks", 1),  # control for fp8_engine: the same model without FP8
    "fp8_engine": Case("blocks", 1, ("rollout.precision=fp8", "algorithm.importance_sampling=token")),
}
MODELS: dict[str, Mapping[str, Any]] = {
    "dense": {},
    "four_layers": {"num_hidden_layers": 4},
    "fp8": {},
    # FP8 in the engine needs matrices whose sizes are multiples of 128.
    "blocks": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True},
}
# Four layers need twice the steps to learn to copy digits. Otherwise RL stays near 0.6.
SFT_SETTINGS: dict[str, tuple[str, ...]] = {"four_layers": ("train.steps=400",), "fp8": ("model.fp8=tensorwise",)}


class Devices:
    """Allocates slots on devices. A device has several slots, because tiny models leave space.

    ``take`` waits until the requested number of different devices has a free slot.
    """

    def __init__(self, devices: int, slots: int) -> None:
        self._free, self._changed = Counter(dict.fromkeys(range(devices), slots)), Condition()

    def take(self, count: int) -> list[int]:
        with self._changed:
            self._changed.wait_for(lambda: len(+self._free) >= count)
            taken = [device for device, _ in (+self._free).most_common(count)]
            self._free.subtract(taken)
            return taken

    def give_back(self, devices: Iterable[int]) -> None:
        with self._changed:
            self._free.update(devices)
            self._changed.notify_all()


def main(
    out: Annotated[Path, typer.Argument(help="folder for the runs and learning.json")],
    *,
    case: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(CASES)}; all by default")] = None,
    platform: Annotated[str, typer.Option(help="cuda, or cpu to try the script")] = "cuda",
    devices: Annotated[int, typer.Option(min=1, help="devices of the machine")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="runs that share a device")] = 3,
    seed: Annotated[int, typer.Option(help="seed of the task, the initial weights and the runs")] = 0,
    setting: Annotated[list[str] | None, typer.Option(help="section.key=value for every RL run")] = None,
) -> None:
    chosen = {name: CASES[name] for name in case or CASES}
    out.mkdir(parents=True, exist_ok=True)
    run(
        [sys.executable, "-m", "retool_mcore", "data", "task", str(out / "task"), "--seed", str(seed)],
        out / "task.log",
        [],
    )
    dtype = "float32" if platform == "cpu" else "bfloat16"
    common = [f"run.root={out}", f"run.seed={seed}", f"run.platform={platform}", f"model.dtype={dtype}"]
    free = Devices(devices, slots)
    with ThreadPoolExecutor() as pool:
        names = sorted({each.model for each in chosen.values()})
        sft = {
            name: pool.submit(train_sft, out, name, common=common, free=free, platform=platform, seed=seed)
            for name in names
        }
        more = [*common, *([ENGINE] if platform == "cuda" else []), *(setting or ())]
        started = {
            name: pool.submit(train_rl, out, name, common=more, free=free, sft=sft[each.model])
            for name, each in chosen.items()
        }
        found = {name: future.result() for name, future in started.items()}
    (out / "learning.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, row in found.items():
        typer.echo(f"{name:16} {json.dumps(row)}")
    raise typer.Exit(int(any("error" in row for row in found.values())))


def train_sft(out: Path, name: str, *, common: list[str], free: Devices, platform: str, seed: int) -> Path:
    """The directory of model ``name`` after SFT."""
    start = out / "task" / "model"
    if MODELS[name]:
        start = out / f"model_{name}"
        script = [
            sys.executable,
            __file__,
            "--write-model",
            str(out / "task" / "model"),
            str(start),
            name,
            platform,
            str(seed),
        ]
        run(script, out / f"model_{name}.log", [])
    taken = free.take(1)
    try:
        command = [sys.executable, "-m", "retool_mcore", "sft", "configs/sft_tiny_cpu.toml", *common]
        command += [f"run.name=sft_{name}", f"model.path={start}", "cluster.gpus_per_node=1"]
        command += SFT_SETTINGS.get(name, ())
        files = f'validation.files=["{out}/task/sft_val.parquet"]'
        command += [f"data.train_file={out}/task/sft_train.parquet", files]
        run(command, out / f"sft_{name}.log", taken)
    finally:
        free.give_back(taken)
    return out / f"sft_{name}" / "export"


def train_rl(out: Path, name: str, *, common: list[str], free: Devices, sft: Future[Path]) -> dict[str, Any]:
    case, model = CASES[name], sft.result()
    taken = free.take(case.devices)
    started = time.monotonic()
    try:
        command = [sys.executable, "launch/rl.py", "configs/rl_tiny_cpu.toml", *common, f"run.name={name}"]
        command += [f"model.path={model}", f"cluster.gpus_per_node={case.devices}", *case.settings]
        command += [f"data.train_file={out}/task/rl_train.parquet"]
        command += [f"validation.files=['{out}/task/rl_val.parquet']"]
        run(command, out / f"{name}.log", taken)
    except subprocess.CalledProcessError as error:
        return {"error": f"exit code {error.returncode}", "seconds": round(time.monotonic() - started)}
    finally:
        free.give_back(taken)
    rows, sft_rows = metrics_of(out / name), metrics_of(out / f"sft_{case.model}")
    return {
        "sft_loss_last_20": sum(row["loss"] for row in sft_rows[-20:]) / 20,
        "sft_val_loss": sft_rows[-1]["val_loss"],
        "first_step": rows[0]["accuracy"],
        "last_five": sum(row["accuracy"] for row in rows[-5:]) / 5,
        "held_out": rows[-1]["val/accuracy"],
        "mismatch_kl": sum(row["rollout_corr/kl"] for row in rows) / len(rows),
        "mismatch_p99": max(row["mismatch/p99"] for row in rows),
        "steps": len(rows),
        "seconds": round(time.monotonic() - started),
    }


def metrics_of(folder: Path) -> list[dict[str, float]]:
    from retool_mcore.run.metrics import read_metrics  # loads torch, which a page of help does not need

    return read_metrics(folder / "metrics.jsonl")


def run(command: list[str], log: Path, devices: list[int]) -> None:
    environment = {**os.environ, **({VISIBLE: ",".join(map(str, devices))} if devices else {})}
    with log.open("wb") as file:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=True)


def write_model(task_model: Path, folder: Path, name: str, platform: str, seed: str) -> None:
    """Write a random model with the tokenizer and config of ``task_model`` and MODELS[name]."""
    from retool_mcore.platforms import get_platform

    get_platform(platform).activate()
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = json.loads((task_model / "config.json").read_text(encoding="utf-8"))
    shape = {key: value for key, value in shape.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(int(seed))
    if "num_experts" in MODELS[name]:
        # SGLang's fused kernel for rotary embeddings and the cache does not support heads of 16.
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape | {"head_dim": 64} | dict(MODELS[name]))))
    else:
        shape.pop("layer_types", None)  # it has one entry per layer
        model = Qwen2ForCausalLM(Qwen2Config(**(shape | dict(MODELS[name]))))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task_model).save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-model"]:
        write_model(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:7])
    else:
        typer.run(main)
