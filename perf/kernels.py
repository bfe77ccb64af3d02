r"""Divides the GPU time of an SFT step into kinds of kernels and gaps.

    torchrun --nproc-per-node 2 perf/kernels.py sft_7b_h200x2 --model DIR --data DIR/sft.parquet

Runs the case's steps like launch/sft_mcore.py and profiles the last one with torch's profiler on
rank 0. The kernel's name determines its kind; unknown kernels are "other", and the output lists
them. If several kernels overlap, the time counts once, for the kind that is first in ``KINDS``, so
kinds and gaps add up to the step. ``--trace`` keeps the trace, in which Perfetto (ui.perfetto.dev)
shows what the host did in a gap. Profiling costs time, so read the speed from the steps before.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from bench import config_of, provenance, summarize
from sft_steps import join_group, train

from retool_mcore.cli.common import guarded
from retool_mcore.config import SftConfig
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.tree import sft_worker_config
from retool_mcore.verl.sft_engine import megatron_worker

KINDS = {  # kind -> pattern of kernel names; among overlapping kernels the first kind counts
    "attention": r"fmha|flash|attention|cudnn_generated|sdpa|_fwd_(grouped_)?kernel",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "cross-entropy": r"cross_entropy|softmax|logsumexp",
    "optimizer": r"adam|multi_tensor|l2norm",
    "experts' routing": r"permut|sort_chunks|row_id_map|topk|aux_loss",
    "norms": r"rmsnorm|layernorm|layer_norm|_norm_|ln_",
    "SwiGLU, RoPE": r"silu|glu|rope|rotary|gated",
    "FP8 casts": r"quantize|cast_transpose|amax|transpose_kernel|scale_inv",
    "communication": r"nccl",
    "copies, sums": r"memcpy|memset|elementwise|copy_kernel|vectorized|reduce_kernel|index|cat|fill",
}
GAPS, OTHER = "gaps", "other"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]  # an event of a Chrome trace; "ts" and "dur" are in microseconds


def kind_of(kernel: str) -> str:
    """The first of ``KINDS`` whose pattern matches the kernel's name, or OTHER."""
    return next((kind for kind, rule in KINDS.items() if re.search(rule, kernel, re.IGNORECASE)), OTHER)


def shares(kernels: Iterable[tuple[str, float, float]], start: float, end: float) -> dict[str, float]:
    """Time by kind between ``start`` and ``end``. Of overlapping kernels, the first kind counts.

    ``kernels``: name, start and end of each, in the same unit as ``start`` and ``end``.
    """
    order = [*KINDS, OTHER]
    edges: list[tuple[float, int, str]] = []
    for name, *times in kernels:
        begins, ends = max(times[0], start), min(times[1], end)
        if ends > begins:
            edges += [(begins, 1, kind_of(name)), (ends, -1, kind_of(name))]
    found, running, now = dict.fromkeys([*order, GAPS], 0.0), Counter[str](), start
    for at, change, kind in sorted(edges):
        found[_first(running, order)] += at - now
        running[kind] += change
        now = at
    found[GAPS] += end - now
    return found


def _first(running: Counter[str], order: list[str]) -> str:
    return next((kind for kind in order if running[kind]), GAPS)


@guarded
def main(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml, of kind sft")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    model: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()] = Path("kernels.json"),
    steps: Annotated[int, typer.Option(min=3, help="steps to run; the last is profiled")] = 6,
    trace: Annotated[Path | None, typer.Option(help="file for the trace, .json or .json.gz")] = None,
) -> None:
    config = config_of(SftConfig, case, model, data, steps=steps, overrides=overrides or ())
    platform = join_group(config.run.platform)
    worker = megatron_worker(config, sft_worker_config(config, platform))
    recorder = Recorder(platform, trace)
    records = dist.get_rank() == 0
    rows = train(
        worker,
        config,
        platform,
        around=lambda step: recorder if records and step == steps else nullcontext(),
    )
    if dist.get_rank() == 0:
        record = {
            "case": case,
            "provenance": provenance(config),
            "seconds": recorder.found,
            "recorded_step": rows[-1],
            "summary": summarize(rows[2:-1] or rows[1:-1]),
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(json.dumps({"case": case, **recorder.found, **record["summary"]}))
    dist.destroy_process_group()


class Recorder:
    """A context manager that profiles the code within it.

    Afterwards ``found`` has the seconds by kind of kernel. ``trace``: a file to keep the trace in.
    """

    def __init__(self, platform: Platform, trace: Path | None = None) -> None:
        self.found: dict[str, Any] = {}
        self._platform, self._trace = platform, trace
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        )

    def __enter__(self) -> None:
        self._platform.synchronize()
        self._profiler.__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._platform.synchronize()
        self._profiler.__exit__(None, None, None)
        if error is None:
            self.found = report(list(kernels_of(self._events())))

    def _events(self) -> list[Event]:
        with tempfile.TemporaryDirectory() as folder:
            path = self._trace or Path(folder) / "trace.json.gz"
            self._profiler.export_chrome_trace(str(path))
            return read_trace(path)


def read_trace(path: Path) -> list[Event]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)["traceEvents"]


def kernels_of(events: Iterable[Event]) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in seconds of everything that ran on the device.

    Skips the host's ranges, which torch projects onto the device's timeline.
    """
    for event in sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"]):
        yield event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def report(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Seconds by kind from the first kernel to the last, and the longest unknown kernels."""
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
