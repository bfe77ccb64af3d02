r"""Runs one case of perf/cases.toml through its launcher and writes the result as JSON.

    python perf/bench.py sft_7b_h200x2 --model DIR --data DIR/sft.parquet \
        --out result.json [section.key=value ...]

It discards the first steps, which warm up the allocator, cuDNN's plans and compiled kernels. The
run does not save or validate. perf/compare.py reads the result.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from retool_mcore.cli.common import guarded
from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.process import exit_on_sigterm

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "verl",
    "megatron-bridge",
    "sglang",
    "ray",
    "transformers",
    "flash-attn",  # used by verl's FSDP in comparisons
)
KINDS: dict[str, type[RunConfig]] = {"sft": SftConfig, "rl": RlConfig}
NO_EXTRAS = ("validation.every=0", "checkpoint.every_steps=0", "checkpoint.export=false")
AGENT_LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
STOPPED = 143  # exit status of a run stopped by a signal; the steps before it count
TOKENS = "perf/total_num_tokens"
RATES = ("tokens_per_s", "perf/throughput", "mfu")  # see run/metric_table.py
PERCENTILES = (1, 10, 50, 90, 99, 100)


@guarded
def bench(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    out: Annotated[Path, typer.Option(help="file for the result")] = Path("result.json"),
    model: Annotated[str | None, typer.Option(help="replaces the configuration's model.path")] = None,
    data: Annotated[str | None, typer.Option(help="replaces the files for training and validation")] = None,
    warmup: Annotated[int, typer.Option(min=1, help="steps to discard")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="steps to measure")] = 20,
    history: Annotated[
        bool, typer.Option(help="append the result to runs/perf/history.jsonl, and to TensorBoard in runs/perf")
    ] = False,
) -> None:
    from retool_mcore.run.metrics import read_metrics  # loads torch, which perf/compare.py does not need

    settings = read_case(case)
    total = warmup + steps
    words = list(settings["set"])
    words += [f"model.path={model}"] if model else []
    words += data_words(data) if data else []
    if scripted := settings.get("scripted"):
        loop = "scripted_tail_loop.yaml" if scripted == "tail" else "scripted_loop.yaml"
        words.append(f"verl_overrides.{AGENT_LOOPS}={ROOT / 'perf' / loop}")
    words += ["validation.before=false"] if settings["kind"] == "rl" else []
    words += [f"train.steps={total}", *NO_EXTRAS, *(overrides or ())]
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        words += [f"run.root={folder}", f"run.name={case}"]
        config = load_config(KINDS[settings["kind"]], ROOT / settings["config"], words)
        program = "perf/rl_alone.py" if settings.get("alone") else "launch/rl.py"
        command = launch_command(settings["kind"], config, settings["config"], words, rl=program)
        log, launched_s = out.with_suffix(".log"), time.time()
        with log.open("wb") as file:
            code = run_to_its_end(command, file)
        rows = read_metrics(config.run.dir / "metrics.jsonl") if (config.run.dir / "metrics.jsonl").exists() else []
        logs = config.run.dir / "logs"
        for path in sorted(logs.glob("*.log")) if logs.is_dir() else ():
            shutil.copy(path, out.with_name(f"{out.stem}.{path.name}"))
    record = {
        "case": case,
        "command": ["python", "perf/bench.py", *sys.argv[1:]],
        "exit_code": code,
        "provenance": provenance(config),
        "lengths": length_histogram(rows[warmup:]),
        "warmup_steps": warmup,
        "start": start_of(rows, launched_s),
        "steps": rows[warmup:],
        "summary": summarize(rows[warmup:]),
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if history and code == 0:
        add_to_history(record)
    typer.echo(json.dumps({"case": case, "exit_code": code, "steps": len(rows), **record["summary"]}))
    raise typer.Exit(code)


def start_of(rows: Sequence[dict[str, float]], launched_s: float) -> dict[str, float]:
    """Seconds from launch to first step: by stage if the run reports them, else the total."""
    if not rows:
        return {}
    stages = {name: value for name, value in rows[0].items() if name.startswith("timing_s/start")}
    return stages or {"timing_s/start": round(rows[0]["unix_s"] - rows[0]["timing_s/step"] - launched_s, 2)}


def run_to_its_end(command: Sequence[str], log: BinaryIO) -> int:
    """Run the command. Returns its exit status, or STOPPED if a signal stops this process.

    After a signal, the caller can still write the measured steps.
    """
    exit_on_sigterm()
    with subprocess.Popen(command, cwd=ROOT, env=with_perf_on_path(), stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            return process.wait()
        except (KeyboardInterrupt, SystemExit):
            process.terminate()
            return STOPPED


def with_perf_on_path() -> dict[str, str]:
    """The environment in which a run's workers find perf/scripted.py."""
    paths = (str(ROOT / "perf"), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_case(name: str) -> dict[str, Any]:
    """A table of cases.toml: kind, config, set, and perhaps scripted, alone, threshold.

    Raises ConfigError for an unknown name.
    """
    cases = tomllib.loads((ROOT / "perf" / "cases.toml").read_text(encoding="utf-8"))
    if name not in cases:
        raise ConfigError(f"{name!r} is not a case of perf/cases.toml. Known: {', '.join(cases)}.")
    return cases[name]


def config_of[RunT: RunConfig](
    config_class: type[RunT], case: str, model: str, data: str, *, steps: int, overrides: Sequence[str] = ()
) -> RunT:
    """The configuration of a case that trains and validates on ``data`` and saves nothing.

    Raises ConfigError if ``config_class`` does not match the case's kind.
    """
    settings = read_case(case)
    if KINDS[settings["kind"]] is not config_class:
        raise ConfigError(
            f"Case {case!r} of perf/cases.toml has kind {settings['kind']!r}. Choose one of the other kind."
        )
    words = [f"model.path={model}", *data_words(data), f"train.steps={steps}", *NO_EXTRAS, *overrides]
    return load_config(config_class, ROOT / settings["config"], [*settings["set"], *words])


def data_words(path: str) -> list[str]:
    """Overrides that train and validate on one file."""
    return [f"data.train_file={path}", f"validation.files=[{json.dumps(path)}]", "data.allow_overlap=true"]


def launch_command(
    kind: str, config: RunConfig, path: str, words: Sequence[str], *, rl: str = "launch/rl.py"
) -> list[str]:
    """The command that starts a run. ``rl``: the program for RL cases."""
    if kind == "rl":
        return [sys.executable, rl, path, *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(config.cluster.gpus_per_node), "launch/sft_mcore.py", path, *words]


def provenance(config: RunConfig) -> dict[str, Any]:
    """Everything that a result depends on: commit, versions, hardware and settings."""
    settings = config.model_dump(exclude={"run", "source"})
    return {
        "commit": os.environ.get("RETOOL_COMMIT") or git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(config.cluster.gpus_per_node),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "config_sha256": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
        "settings": settings,
    }


def hardware(gpus: int) -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "devices": sorted(set(names)) or [platform.processor() or platform.machine()],
        "used": gpus,
        "cpus": os.cpu_count(),
        "cuda": torch.version.cuda or "none",
    }


def hardware_name(record: dict[str, Any]) -> str:
    hardware = record["provenance"]["hardware"]
    return f"{'+'.join(hardware['devices']).replace(' ', '_')}x{hardware['used']}"


def add_to_history(record: dict[str, Any]) -> None:
    """Append the summary to runs/perf/history.jsonl and to TensorBoard.

    TensorBoard's step is the number of commits.
    """
    from torch.utils.tensorboard import SummaryWriter

    name = f"{record['case']}.{hardware_name(record)}"
    numbers = {k: v for k, v in record["summary"].items() if isinstance(v, int | float)}
    kept = {"name": name, **{k: record["provenance"][k] for k in ("commit", "dirty", "date")}, **numbers}
    (ROOT / "runs" / "perf").mkdir(parents=True, exist_ok=True)
    with (ROOT / "runs" / "perf" / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")
    with SummaryWriter(str(ROOT / "runs" / "perf" / name)) as board:
        for metric, value in numbers.items():
            board.add_scalar(metric, value, int(git("rev-list", "--count", "HEAD") or 0))


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def length_histogram(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Percentiles of the tokens per step. perf/compare.py compares only runs with equal work."""
    tokens = [row[TOKENS] for row in rows if TOKENS in row]
    if not tokens:
        return {}
    return {"tokens_per_step": {str(p): float(np.percentile(tokens, p)) for p in PERCENTILES}, "total": sum(tokens)}


def summarize(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians of times and rates over the measured steps, and peak memory in GiB."""
    if not rows:
        return {}
    names = sorted(name for name in rows[-1] if name.startswith("timing_s/") or name in RATES)
    summary: dict[str, Any] = {name: round(statistics.median(row.get(name, 0.0) for row in rows), 4) for name in names}
    return summary | ({"memory_gib": round(rows[-1]["memory_gib"], 2)} if "memory_gib" in rows[-1] else {})


if __name__ == "__main__":
    typer.run(bench)
