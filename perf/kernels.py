r"""Where the time of an SFT step goes on a GPU, by kind of kernel, gaps included.

    torchrun --nproc-per-node 2 perf/kernels.py sft_7b_h200x2 --model DIR --data DIR/sft.parquet

Runs the case's steps as launch/sft_mcore.py does and records the last of them with torch's profiler
on rank 0. A kernel's kind is told by its name; what no rule knows is "other" and listed. Time in
which several kernels run counts once, for the first rule in ``KINDS`` that one of them is of, so
the kinds and the gaps add up to the step. Recording costs time: the step before, not recorded, is
the one whose speed counts.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from bench import ROOT, provenance, read_case, summarize

from retool_mcore.cli.common import guarded
from retool_mcore.config import SftConfig, load_config
from retool_mcore.data.chat import load_tokenizer
from retool_mcore.data.sft import PackedBatches, load_sft
from retool_mcore.platforms.base import get_platform
from retool_mcore.run.metrics import PhaseTimer
from retool_mcore.train.sft import step_rates
from retool_mcore.verl.sft_engine import SftEngine, megatron_worker, time_optimizer

KINDS = {  # in the order in which overlapping kernels count
    "attention": r"fmha|flash|attention|cudnn_generated|sdpa",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "cross-entropy": r"cross_entropy|softmax|online_softmax|logsumexp",
    "optimizer": r"adam|multi_tensor|l2norm",
    "norms": r"rmsnorm|layernorm|layer_norm|_norm_|ln_",
    "SwiGLU, RoPE": r"swiglu|silu|glu|rope|rotary|dgated|gated",
    "FP8 casts": r"quantize|cast_transpose|amax|transpose_kernel|scale_inv",
    "messages": r"nccl",
    "copies, sums": r"memcpy|memset|elementwise|copy_kernel|vectorized|reduce_kernel|index|cat|fill",
}
GAPS, OTHER = "gaps", "other"


def kind_of(kernel: str) -> str:
    """The first of ``KINDS`` whose rule knows the kernel's name, or OTHER."""
    return next((kind for kind, rule in KINDS.items() if re.search(rule, kernel, re.IGNORECASE)), OTHER)


def shares(kernels: Iterable[tuple[str, float, float]], start: float, end: float) -> dict[str, float]:
    """Time by kind from ``start`` to ``end``; ``kernels``: name, start and end of each, one unit.

    Of kernels that run at the same time the kind that is first in KINDS counts.
    """
    order = [*KINDS, OTHER]
    edges: list[tuple[float, int, str]] = []
    for name, *times in kernels:
        begins, ends = max(times[0], start), min(times[1], end)
        if ends > begins:
            edges += [(begins, 1, kind_of(name)), (ends, -1, kind_of(name))]
    found, running, now = dict.fromkeys([*order, GAPS], 0.0), Counter[str](), start
    for at, change, kind in sorted(edges):
        found[_counts(running, order)] += at - now
        running[kind] += change
        now = at
    found[GAPS] += end - now
    return found


def _counts(running: Counter[str], order: list[str]) -> str:
    return next((kind for kind in order if running[kind]), GAPS)


@guarded
def main(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml, of kind sft")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    model: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()] = Path("kernels.json"),
    steps: Annotated[int, typer.Option(min=3, help="the last is recorded")] = 6,
) -> None:
    words = [*read_case(case)["set"], f"model.path={model}", f"data.train_file={data}", f"data.val_file={data}"]
    words += [f"train.steps={steps}", "data.allow_overlap=true", *(overrides or ())]
    config = load_config(SftConfig, ROOT / read_case(case)["config"], words)
    platform = get_platform(config.run.platform)
    platform.activate()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(platform.device.comm_backend)
    timer = PhaseTimer()
    worker = megatron_worker(config, platform)
    time_optimizer(worker.engine, platform, timer)
    engine = SftEngine(worker, config, platform)
    examples = load_sft(data, load_tokenizer(model), config.data.max_length_tokens).examples
    batches = PackedBatches(
        examples, config.train.global_batch, config.run.seed, engine.dp_size, engine.dp_rank,
        hidden_size=engine.shape.hidden,
    )  # fmt: skip
    rows: list[dict[str, float]] = []
    found: dict[str, Any] = {}
    timer.flush()
    for step in range(1, steps + 1):
        with timer.span("data"):
            sequences = batches(step)
        with Recorder(platform, on=step == steps and dist.get_rank() == 0) as recorder, timer.span("forward_backward"):
            metrics = engine.train_batch(sequences)
        times = timer.flush()
        rows.append({"step": step, **metrics, **step_rates(metrics, times, platform), **times})
        found = recorder.found
    if dist.get_rank() == 0:
        record = {
            "case": case,
            "provenance": provenance(config),
            "seconds": found,
            "recorded_step": rows[-1],
            "summary": summarize(rows[2:-1] or rows[1:-1]),
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(json.dumps({"case": case, **found, **record["summary"]}))
    dist.destroy_process_group()


class Recorder:
    """Records the kernels of what runs within it, when ``on``; ``found`` then has their shares."""

    def __init__(self, platform: Any, *, on: bool) -> None:
        self.found: dict[str, Any] = {}
        self._platform, self._profiler = platform, None
        if on:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            )

    def __enter__(self) -> Recorder:
        if self._profiler is not None:
            self._platform.synchronize()
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is None:
            return
        self._platform.synchronize()
        self._profiler.__exit__(None, None, None)
        if error[0] is None:
            self.found = report(list(kernels_of(self._profiler)))


def kernels_of(profiler: Any) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in seconds of everything that ran on the device."""
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            yield event.name, event.time_range.start / 1e6, event.time_range.end / 1e6


def report(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Seconds by kind from the first kernel to the last, and the longest of unknown names."""
    if not kernels:
        return {}
    by_kind = shares(kernels, min(start for _, start, _ in kernels), max(end for _, _, end in kernels))
    unknown = Counter[str]()
    for name, start, end in kernels:
        if kind_of(name) == OTHER:
            unknown[name[:80]] += end - start
    found: dict[str, Any] = {kind: round(seconds, 4) for kind, seconds in by_kind.items()}
    return found | {"kernels": len(kernels), "unknown": dict(unknown.most_common(8))}


if __name__ == "__main__":
    typer.run(main)
