"""The gate: what it lets through, what it stops, and what it refuses to compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.unit.perf.modules import bench, interleave
from tests.unit.perf.modules import compare as gate

ROOT = Path(__file__).parents[3]
SECONDS = (1.00, 1.02, 0.99, 1.01, 1.00, 0.98, 1.03, 1.00, 1.01, 0.99)


def record(scale: float = 1.0, tokens: float = 1000.0, **changed: Any) -> dict[str, Any]:
    steps = [
        {"perf/total_num_tokens": tokens, "timing_s/step": s * scale + 5.0, "timing_s/save_checkpoint": 5.0}
        for s in SECONDS
    ]
    provenance: dict[str, Any] = {"commit": "0123456789", "settings": {"model": {"fp8": "off"}}}
    provenance["hardware"] = {"devices": ["NVIDIA H200"], "used": 2}
    made = {
        "case": "sft_7b_h200x2",
        "exit_code": 0,
        "steps": steps,
        "lengths": {"total": tokens * len(steps)},
        "summary": {"timing_s/step": scale},
        "provenance": provenance,
    }
    return made | changed


def compare(folder: Path, head: dict[str, Any], *more: str) -> Result:
    for name, content in (("head", head), ("base", record())):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return run_compare(str(folder / "head.json"), str(folder / "base.json"), *more)


def run_compare(*words: str) -> Result:
    app = typer.Typer()
    app.command()(gate.compare)
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.mark.parametrize(
    ("scale", "more", "code", "message"),
    [
        (1.0, (), 0, "no difference"),
        (1.02, (), 0, "no difference"),
        (1.10, (), 1, "slower"),
        (0.80, (), 1, "faster, without --explained"),
        (0.80, ("--explained", "a fused kernel"), 0, "faster, as explained: a fused kernel"),
    ],
)
def test_only_an_unexplained_difference_beyond_the_threshold_fails(
    scale: float, more: tuple[str, ...], code: int, message: str, tmp_path: Path
):
    done = compare(tmp_path, record(scale), *more)
    assert done.exit_code == code, done.stderr
    assert message in done.stdout


BASELINES = ROOT / "perf" / "baselines"
SFT_7B, RL_7B = (BASELINES / f"{case}.NVIDIA_H200x2.json" for case in ("sft_7b_h200x2", "rl_7b_h200x2"))


def slower_steps(record: dict[str, Any]) -> None:
    for row in record["steps"]:
        row["timing_s/step"] *= 1.1
        row.pop("unix_s", None)


def another(part: str, *keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        tree = record["provenance"][part]
        for key in keys[:-1]:
            tree = tree[key]
        assert tree[keys[-1]] != value
        tree[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("path", "change", "code", "message"),
    [
        (SFT_7B, slower_steps, 1, "slower"),
        (RL_7B, slower_steps, 1, "slower"),
        (RL_7B, another("settings", "train", "mode", value="async"), 2, "train.mode is 'async', but"),
        (SFT_7B, another("settings", "parallel", "tp", value=2), 2, "parallel.tp is 2, but 1 in the baseline"),
        (SFT_7B, another("versions", "torch", value="2.5.0"), 2, "torch is '2.5.0', but"),
        (SFT_7B, another("settings", "train", "steps", value=99), 0, "no difference"),
    ],
    ids=["step", "step of rl", "mode", "layout", "torch", "how long"],
)
def test_a_change_of_a_measured_baseline_is_seen(
    path: Path, change: Callable[[dict[str, Any]], None], code: int, message: str, tmp_path: Path
):
    made = json.loads(path.read_text())
    change(made)
    (tmp_path / "head.json").write_text(json.dumps(made))
    done = run_compare(str(tmp_path / "head.json"), str(path))
    assert done.exit_code == code, done.stdout + done.stderr
    assert message in (done.stdout + done.stderr).replace("\n", " ")
    if code == 2:
        named = run_compare(str(tmp_path / "head.json"), str(path), "--changed", message.partition(" is ")[0])
        assert named.exit_code == 0 and "no difference" in named.stdout, "a change on purpose"


def test_a_step_takes_the_time_since_the_row_before_it_without_what_only_some_steps_do():
    base = {"perf/total_num_tokens": 10.0, "timing_s/metrics": 1.0, "timing_s/between_steps": 2.0}
    rows = [
        {**base, "unix_s": 100.0, "timing_s/step": 30.0, "timing_s/testing": 4.0, "timing_s/save_checkpoint": 7.0},
        {**base, "unix_s": 150.0, "timing_s/step": 40.0, "timing_s/save_checkpoint": 5.0, "timing_s/validate": 15.0},
        {**base, "timing_s/step": 40.0, "perf/total_num_tokens": 20.0},  # an older record
    ]
    assert gate.token_times({"steps": rows}) == [(30 + 1 + 2 + 4 - 4 - 7) / 10, (50 - 5 - 15) / 10, (40 + 3) / 20]


def test_a_result_has_medians_the_start_and_percentiles_of_the_work():
    measured = ((3.0, 10.0), (1.0, 20.0), (7.0, 60.0))
    rows = [{"timing_s/step": s, "other": 9.0, gate.TOKENS: n, "memory_gib": 1.004 + n} for s, n in measured]
    assert bench.summarize(rows) == {"timing_s/step": 3.0, "memory_gib": 61.0}
    work = bench.length_histogram(rows)
    assert work["total"] == 90 and (work["tokens_per_step"]["50"], work["tokens_per_step"]["100"]) == (20, 60)
    assert bench.start_of([{"unix_s": 130.0, **rows[2]}, *rows], 100.0) == {"timing_s/start": 23.0}
    stages = {"timing_s/start": 20.0, "timing_s/start/engines": 12.0}
    assert bench.start_of([{**rows[0], **stages, "unix_s": 130.0}], 100.0) == stages


ASKED = "behavior/requests"


def make_worse(record: dict[str, Any], what: str) -> None:
    if what == "a later start":
        record["start"]["timing_s/start"] = 27.0
    elif what == "more memory":
        record["summary"]["memory_gib"] = 1.8
    for row in record["steps"]:
        row["timing_s/step"] *= 1.3 if what == "slower" else 1.0
        row[ASKED] = 3.1 if what == "more requests" else 3.0


@pytest.mark.parametrize("worse", ["slower", "more requests", "a later start", "more memory", ""])
def test_make_perf_sees_what_a_small_model_is_slow_by(worse: str):
    """Host time of a token, requests of a trajectory, the start and memory; each in every round."""

    def of_a_round(start_s: float = 20.0, memory_gib: float = 1.2) -> dict[str, Any]:
        made = record(case="rl_alone_cpu", start={"timing_s/start": start_s}, summary={"memory_gib": memory_gib})
        make_worse(made, "")
        return made

    pairs = [(of_a_round(), of_a_round(15.2, 1.0)) for _ in range(2)]  # a larger share alone is not enough
    make_worse(pairs[0][0], worse)
    if worse not in ("slower", ""):
        assert interleave.report("{:.3f}", pairs, 0.25) == [], "a single round that was disturbed"
    make_worse(pairs[1][0], worse)
    assert interleave.report("{:.3f}", pairs, 0.25) == ([worse] if worse else [])


@pytest.mark.parametrize("path", sorted((ROOT / "perf" / "baselines").glob("*.json")), ids=lambda path: path.stem)
def test_every_baseline_is_found_by_its_case_and_hardware(path: Path):
    done = run_compare(str(path))
    assert done.exit_code == 0 and "seconds per token: 1.0000 of the baseline's" in done.stdout, done.stderr


def other_hardware() -> dict[str, Any]:
    made = record()
    made["provenance"]["hardware"]["devices"] = ["NVIDIA H100"]
    return made


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (record(tokens=900.0), "not comparable: 900 tokens per step, but 1000 in the baseline"),
        (other_hardware(), "hardware is NVIDIA_H100x2, but NVIDIA_H200x2 in the baseline"),
        (record(exit_code=1), "has no measured steps or its run failed"),
        (record(exit_code=143, steps=[]), "has no measured steps"),
        (record(case="sft_tiny_cpu"), "case is sft_tiny_cpu"),
    ],
)
def test_other_work_or_hardware_is_refused(head: dict[str, Any], message: str, tmp_path: Path):
    done = compare(tmp_path, head)
    assert done.exit_code == 2 and message in done.stderr.replace("\n", " ")
