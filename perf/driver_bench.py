"""What the driver of RL computes for each token of a step, ours beside verl's.

    python perf/driver_bench.py --tokens 1000000 --tokens 10000000
    python perf/driver_bench.py --tokens 140000000 --mean 16384 --longest 20480 --no-verls

One JSON object a line. The stages are those after the workers' pass: old log-probabilities,
advantages and metrics, and what engine and actor say of the tokens. ``workers_us_a_token`` is what
ours has the workers do in place of the driver, each for its share of the tokens. The queue is a
table in memory, so that reading costs what it must: one copy of a column. Each case is a process of
its own; memory is what the stages add to it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from functools import cached_property
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms.base import get_platform

app = typer.Typer(pretty_exceptions_enable=False)
GROUP, PROMPT, KINDS = 16, 64, 64  # responses to a prompt; tokens of one; different rows, used again and again
CONFIG = "configs/rl_tiny_cpu.toml"


class Table:
    """verl's queue as far as the stages use it; what is written is cut into rows, and forgotten."""

    def __init__(self, lengths: list[int]) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.kinds = []
        for length in lengths[:KINDS]:
            engine_T = -3 * torch.rand(length, generator=drawn)
            model_T = torch.zeros(PROMPT)
            actor_T = engine_T + 0.02 * torch.randn(length, generator=drawn)
            score_T = torch.zeros(length)
            score_T[-1] = float(torch.randint(0, 2, (1,), generator=drawn))
            self.kinds.append(
                {
                    "prompts": torch.ones(PROMPT, dtype=torch.long),
                    "responses": torch.ones(length, dtype=torch.long),
                    "response_mask": (torch.rand(length, generator=drawn) < 0.8).long(),
                    "rm_scores": score_T,
                    "rollout_log_probs": engine_T,
                    "old_log_probs": actor_T,
                    "advantages": score_T,
                    "returns": score_T,
                    "log_probs": torch.cat([model_T, actor_T]),
                    "entropy": torch.cat([model_T, -actor_T]),
                    "num_turns": 3,
                }
            )
        self._compare()
        self.keys = [f"g{row // GROUP}_{row % GROUP}_0" for row in range(len(lengths))]
        self.kind_of = {key: self.kinds[row % KINDS] for row, key in enumerate(self.keys)}
        sizes = [len(self.kinds[row % KINDS]["responses"]) for row in range(len(lengths))]
        self.tokens = sum(sizes)
        self.tags = [
            {"prompt_len": PROMPT, "response_len": size, "seq_len": PROMPT + size}
            | {"min_global_steps": 0, "max_global_steps": 0}
            for size in sizes
        ]

    def _compare(self) -> None:
        """What our workers store of each row, and the gaps that they keep."""
        from retool_mcore.verl.engine_gap import NUMBERS, old_log_probs_of
        from retool_mcore.verl.gap_sums import KeptGaps

        def of(kinds: list[dict[str, Any]], kept: KeptGaps) -> torch.Tensor:
            columns = {
                name: torch.nested.as_nested_tensor([kind[name] for kind in kinds], layout=torch.jagged)
                for name in ("response_mask", "rollout_log_probs", "log_probs", "entropy")
            }
            return old_log_probs_of(columns, kept)[NUMBERS]

        self.kept = [KeptGaps(1) for _ in self.kinds]
        for kind, kept in zip(self.kinds, self.kept, strict=True):
            kind[NUMBERS] = of([kind], kept)[0]
        started = time.process_time()
        of(self.kinds, KeptGaps(1))
        took, tokens = time.process_time() - started, sum(len(kind["responses"]) for kind in self.kinds)
        self.workers_us_a_token = round(1e6 * took / tokens, 4)

    @property
    def workers(self) -> Any:
        """One rank, whose kept gaps are those of all rows."""
        times = [len(self.keys) // len(self.kinds)] * len(self.kinds)
        for row in range(len(self.keys) % len(self.kinds)):
            times[row] += 1
        told = [kept.histogram() for kept in self.kept]
        counts = torch.stack([count * each for each, (count, _) in zip(times, told, strict=True)]).sum(0)
        return SimpleNamespace(
            old_log_probs=lambda batch: batch,
            compute_log_prob=lambda batch: batch,
            gap_histogram=lambda: [(counts, max(largest for _, largest in told))],
            gaps_of_bin=lambda number: [
                torch.cat([kept.of_bin(number).repeat(each) for each, kept in zip(times, self.kept, strict=True)])
            ],
        )

    @cached_property
    def batch(self) -> Any:
        from transfer_queue import KVBatchMeta

        return KVBatchMeta(partition_id="train", keys=list(self.keys), tags=self.tags, extra_info={})

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils import tensordict_utils as tu

        kinds = [self.kind_of[key] for key in keys]
        names = [name for name in select_fields if isinstance(kinds[0].get(name), torch.Tensor)]
        columns = {
            name: torch.nested.as_nested_tensor([kind[name] for kind in kinds], layout=torch.jagged) for name in names
        }
        data = tu.get_tensordict(columns, {})
        if "uid" in select_fields:
            tu.assign_non_tensor_stack(data, "uid", [key.rsplit("_", 2)[0] for key in keys])
        if "num_turns" in select_fields:
            tu.assign_non_tensor_stack(data, "num_turns", [kind["num_turns"] for kind in kinds])
        if "extra_fields" in select_fields:  # ours reads it with the turns, beside the update
            tu.assign_non_tensor_stack(data, "extra_fields", [{} for _ in kinds])
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        for name in fields.keys():  # noqa: SIM118
            for row in fields[name].unbind():
                row.untyped_storage()
        return self.batch


class Peak:
    """The most resident memory of this process beyond what it has at the start, in GiB."""

    def __enter__(self) -> Peak:
        self.gib, self._base, self._over = 0.0, _resident_gib(), threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.gib = max(self.gib, _resident_gib() - self._base)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()


def _resident_gib() -> float:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize() / 2**30


def stages(tokens: int, mean: int, longest: int, *, verls: bool) -> dict[str, Any]:
    """CPU microseconds a token of each stage, and the memory that they take at once."""
    get_platform("cpu").activate()
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import trainer_base

    from retool_mcore.verl import blocks
    from retool_mcore.verl.keys.ppo import ppo_tree
    from retool_mcore.verl.trainer import ReToolTrainer
    from retool_mcore.verl.unpadded import UnpaddedTrainer

    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(1)
    rows = max(GROUP, round(tokens / mean) // GROUP * GROUP)
    spread = (0.6 * torch.randn(KINDS, generator=drawn)).exp()
    kinds = (spread * mean / spread.mean()).clamp(1, longest).long().tolist()
    table = Table((kinds * (rows // KINDS + 1))[:rows])
    settings = [f"rollout.group_size={GROUP}", f"train.prompts_per_step={rows // GROUP}"]
    settings += ["train.mini_batch_prompts=1", f"rollout.max_response_tokens={longest}"]
    settings += [f"train.micro_batch_tokens={longest + 1024}"]
    trainer: Any = object.__new__(ReToolTrainer)  # verl's set-up starts workers
    trainer._run = load_config(RlConfig, CONFIG, settings)
    made = ppo_tree(trainer._run, get_platform("cpu"))
    trainer.config, trainer.use_critic = OmegaConf.create(OmegaConf.to_container(made, resolve=True)), False
    trainer._rollout_moe_lb_metrics_accumulator, trainer._get_n_gpus_for_throughput = None, lambda: 1
    of = trainer_base.PPOTrainer if verls else UnpaddedTrainer

    def step(table: Table) -> dict[str, float]:
        metrics: dict[str, Any] = {}
        took: dict[str, float] = {}

        def timed(name: str, stage: Any, *args: Any) -> None:
            batch, started = table.batch, time.process_time()
            stage(trainer, batch, metrics, *args)
            took[name] = time.process_time() - started

        for module in (blocks, trainer_base):
            module.tq = table  # type: ignore[attr-defined]
        trainer.actor_rollout_wg = table.workers
        trainer._forget_step()
        timed("old_log_prob", of._compute_old_log_prob)
        timed("advantage", of._compute_advantage)
        timed("metrics", of._compute_metrics, {"step": 1.0}, 1, 0)
        if not verls:
            timed("mismatch", lambda *_: metrics.update(trainer._mismatch.metrics()))
        return took

    step(Table([8] * GROUP))  # torch imports what nested tensors need when the first is made
    with Peak() as peak:
        took = step(table)
    each = {f"{name}_us_a_token": round(1e6 * seconds / table.tokens, 4) for name, seconds in took.items()}
    total = round(1e6 * sum(took.values()) / table.tokens, 4)
    return {"whose": "verl" if verls else "ours", "tokens": table.tokens, "rows": rows, **each,
            "us_a_token": total, "peak_gib": round(peak.gib, 2),
            **({} if verls else {"workers_us_a_token": table.workers_us_a_token})}  # fmt: skip


@app.command()
def main(
    tokens: Annotated[list[int], typer.Option(help="of a step's responses; several for several sizes")],
    mean: Annotated[int, typer.Option(help="tokens of a response")] = 2000,
    longest: Annotated[int, typer.Option(help="most of them")] = 8192,
    verls: Annotated[bool, typer.Option(help="verl's own stages, too")] = True,
    whose: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure each size in a process of its own, verl's stages first."""
    if whose:
        typer.echo(json.dumps(stages(tokens[0], mean, longest, verls=whose == "verl")))
        return
    for count in tokens:
        for name in ["verl", "ours"] if verls else ["ours"]:
            sizes = ["--tokens", str(count), "--mean", str(mean), "--longest", str(longest), "--whose", name]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, *sizes], stdout=subprocess.PIPE, text=True, check=True
            )
            typer.echo(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    app()
