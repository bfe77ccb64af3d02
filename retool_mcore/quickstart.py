"""Runs a whole experiment in miniature, on a CPU.

The stages are task, SFT, RL with and without the tool, and evaluation; then a summary. Each stage
runs one of the project's commands and is recorded with its time once it is done. After a kill, run
the same command again: it skips finished stages, and SFT and RL resume from their checkpoints.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.config.sampling import INTERPRETER
from retool_mcore.errors import ReToolError
from retool_mcore.process import END_WITH_PARENT_ENV
from retool_mcore.report.build import write_report
from retool_mcore.run import start
from retool_mcore.run.folder import lock_run, write_atomic
from retool_mcore.run.metrics import read_metrics

SFT_CONFIG = "configs/sft_tiny_cpu.toml"
RL_CONFIG = "configs/rl_tiny_cpu.toml"
RETOOL = ("-m", "retool_mcore")
MODELS = ("sft", "tool_rl", "text_rl")
REPORT = "report.html"
SAMPLES_PER_PROBLEM = 8
EVAL_PROBLEMS = 64
LINE_EVERY_S = 30.0  # between two progress lines, if there is no terminal
VERSIONS_OF = ("torch", "verl", "megatron-core", "megatron-bridge", "sglang", "ray", "transformers", "retool_mcore")

Watch = Callable[[], tuple[int, int | None, str]]  # steps done, total steps if known, status text


class StageFailed(ReToolError, RuntimeError):
    """A stage of the quickstart failed. The message has the end of its log."""


class Stages:
    """Runs stages. Records which are done, and the seconds of each, summed over all attempts."""

    def __init__(self, root: Path, console: Console) -> None:
        self._path = root / "stages.json"
        self._logs = root / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._console = console
        self._state: dict[str, dict[str, Any]] = (
            json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        )

    @property
    def seconds(self) -> dict[str, float]:
        return {name: round(stage["seconds"], 1) for name, stage in self._state.items()}

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        stage = self._state.setdefault(name, {"done": False, "seconds": 0.0})
        start_s = time.monotonic()
        try:
            yield
            stage["done"] = True
        finally:
            stage["seconds"] += time.monotonic() - start_s
            write_atomic(self._path, json.dumps(self._state, indent=2))

    def run(self, name: str, what: str, *argv: str, watch: Watch | None = None) -> None:
        """Run one command with its output in ``logs/<name>.log``; ``watch`` reads its progress."""
        if self._state.get(name, {}).get("done"):
            self._console.print(f"[dim]already done  {what}[/]")
            return
        log = self._logs / f"{name}.log"
        with self._timed(name), log.open("ab") as output, self._progress(what, log) as show:
            environment = {**os.environ, END_WITH_PARENT_ENV: "1"}
            child = subprocess.Popen([sys.executable, *argv], stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                while child.poll() is None:
                    time.sleep(0.5)
                    show(*(watch() if watch is not None else (0, None, "")))
            finally:
                if child.poll() is None:
                    child.terminate()
                    child.wait()
            if child.returncode:
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
                raise StageFailed(
                    f"{what} failed with exit code {child.returncode}. The end of its log, {log}:\n" + "\n".join(tail)
                )
        self._console.print(f"[green]{self.seconds[name]:7.1f} s[/]     {what}")

    @contextmanager
    def _progress(self, what: str, log: Path) -> Generator[Callable[[int, int | None, str], None]]:
        """Show a bar on a terminal; else print a line at the start and every ``LINE_EVERY_S``."""
        if self._console.is_interactive:  # a terminal that can move its cursor
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
            elapsed = TimeElapsedColumn(table_column=Column(no_wrap=True))
            with Progress(*columns, elapsed, console=self._console, transient=True) as progress:
                bar = progress.add_task(what, total=None, text="")
                yield lambda done, total, text: progress.update(bar, completed=done, total=total, text=text)
            return
        start_s = last_s = time.monotonic()
        self._line(f"{'starts':>9}     {what}; log: {log}")

        def show(done: int, total: int | None, text: str) -> None:
            nonlocal last_s
            if (now_s := time.monotonic()) - last_s >= LINE_EVERY_S:
                last_s = now_s
                self._line(f"{now_s - start_s:7.1f} s ... {what}{f': {text}' if text else ''}")

        yield show

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def run(root: Path, seed: int) -> None:
    """Run all stages under ``root``, then write ``summary.json`` and a report.

    Raises StageFailed with the end of the stage's log.
    """
    console = Console()
    if not Path(SFT_CONFIG).is_file():
        raise StageFailed(f"{SFT_CONFIG} does not exist here. Run the quickstart in the root folder of the repository.")
    with lock_run(root):
        _check_same_seed(root, seed)
        stages = Stages(root, console)
        _train(stages, root, seed)
        summary = _summarize(stages, seed, _evaluate(stages, root, seed))
        write_atomic(root / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_report([root / name for name in MODELS], root / REPORT)
        _show_results(console, root, summary)


def _check_same_seed(root: Path, seed: int) -> None:
    marker = root / "seed"
    if not marker.exists():
        marker.write_text(str(seed), encoding="utf-8")
    if (before := marker.read_text(encoding="utf-8")) != str(seed):
        raise StageFailed(
            f"{root} has a quickstart with seed {before}, not {seed}. Choose another --root, or remove {root}."
        )


def _train(stages: Stages, root: Path, seed: int) -> None:
    task, sft = root / "task", root / "sft"
    stages.run("task", "generating the task and the model", *RETOOL, "data", "task", str(task), "--seed", str(seed))
    sft_steps = load_config(SftConfig, SFT_CONFIG).train.steps
    stages.run(
        "sft",
        "supervised fine-tuning",
        *(*RETOOL, "sft", SFT_CONFIG, *_run_settings(root, seed, "sft"), f"model.path={task}/model"),
        f"data.train_file={task}/sft_train.parquet",
        f"validation.files={json.dumps([str(task / 'sft_val.parquet')])}",
        watch=_watch(sft, sft_steps, "loss"),
    )
    rl_steps = load_config(RlConfig, RL_CONFIG).train.steps
    for name, tools, what in (("tool_rl", INTERPRETER, "RL with live tool calls"), ("text_rl", "", "RL, text only")):
        run_dir = root / name
        stages.run(
            name,
            what,
            *("launch/rl.py", RL_CONFIG, *_run_settings(root, seed, name), f"model.path={sft}/export"),
            *(f"rollout.tools={json.dumps([tools] if tools else [])}", f"data.train_file={task}/rl_train.parquet"),
            f"validation.files=[{json.dumps(str(task / 'rl_val.parquet'))}]",
            watch=_watch(run_dir, rl_steps, "accuracy"),
        )


def _run_settings(root: Path, seed: int, name: str) -> tuple[str, ...]:
    return (f"run.root={root}", f"run.seed={seed}", f"run.name={name}")


def _watch(run_dir: Path, total: int, name: str) -> Watch:
    """Watch a run's metrics file for the step and the newest value of ``name``."""
    path = run_dir / "metrics.jsonl"

    def progress() -> tuple[int, int | None, str]:
        rows = read_metrics(path) if path.exists() else []
        if not rows:
            began = start.begun(run_dir)
            return 0, None, start.STAGE_TEXTS[began[-1][0]] if began else "starting"
        return int(rows[-1]["step"]), total, f"step {rows[-1]['step']}/{total}, {name} {rows[-1][name]:.3f}"

    return progress


def _watch_samples(files: list[Path]) -> Watch:
    """Watch an evaluation's sample files, one line per answer. Reads only new lines."""
    read, total = dict.fromkeys(files, 0), len(files) * EVAL_PROBLEMS * SAMPLES_PER_PROBLEM
    done = 0

    def progress() -> tuple[int, int | None, str]:
        nonlocal done
        for path in files:
            if path.exists() and path.stat().st_size > read[path]:
                with path.open("rb") as file:
                    file.seek(read[path])
                    new = file.read()
                read[path] += len(new)
                done += new.count(b"\n")
        return done, total if done else None, f"{done} of {total} answers" if done else "starting the engine"

    return progress


def _evaluate(stages: Stages, root: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Evaluate each model on held-out problems with and without the tool. Returns its reports."""
    out = root / "evaluation"
    cases = [case for name in MODELS for case in (name, f"{name}_text")]
    models = [option for name in MODELS for option in ("--model", f"{name}={root / name / 'export'}")]
    stages.run(
        "evaluate",
        "evaluation on held-out problems",
        *(*RETOOL, "eval", RL_CONFIG, *_run_settings(root, seed, "evaluation")),
        f"model.path={root / 'sft' / 'export'}",
        *(*models, "--data", str(root / "task" / "eval.parquet"), "--out", str(out), "--tool", "both"),
        *("--n", str(SAMPLES_PER_PROBLEM), "--limit", str(EVAL_PROBLEMS)),
        watch=_watch_samples([out / case / "samples.jsonl" for case in cases]),
    )
    return {case: json.loads((out / case / "report.json").read_text(encoding="utf-8")) for case in cases}


def _summarize(stages: Stages, seed: int, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    seconds = stages.seconds
    return {
        "seed": seed,
        "accuracy": {case: report["accuracy"] for case, report in reports.items()},
        "eval_problems": EVAL_PROBLEMS,
        "samples_per_problem": SAMPLES_PER_PROBLEM,
        "seconds_total": round(sum(seconds.values()), 1),
        "seconds": seconds,
        "versions": {name: version(name) for name in VERSIONS_OF},
    }


def _show_results(console: Console, root: Path, summary: dict[str, Any]) -> None:
    """Print the results and the next commands."""
    accuracy = summary["accuracy"]
    names = {"sft": "after SFT", "tool_rl": "after RL with the tool", "text_rl": "after text-only RL"}
    rows = [(label, accuracy[name], accuracy[f"{name}_text"]) for name, label in names.items()]
    title = f"accuracy, mean@{summary['samples_per_problem']} on {summary['eval_problems']} held-out problems"
    table = Table("model", "with the tool", "text only", title=title)
    for label, with_tool, text_only in rows:
        table.add_row(label, f"{with_tool:.3f}", f"{text_only:.3f}")
    console.print(table)
    console.print(f"report       {root / REPORT}")
    console.print(f"summary      {root / 'summary.json'}")
    if shutil.which("retool") is None:  # such as after `make quickstart`, in a shell without the environment
        console.print(f"first        source {Path(sys.executable).parent / 'activate'}", soft_wrap=True)
    console.print(f"curves       tensorboard --logdir {root}")
    console.print(f"trajectories retool view {root / 'tool_rl'} --out {root / 'view.html'}", soft_wrap=True)
