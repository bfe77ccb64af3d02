"""The gate: what it lets through, what it stops, and what it refuses to compare."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

PERF = Path(__file__).parents[3] / "perf"
sys.path.insert(0, str(PERF))  # its files import each other by their names
try:
    import bench
    import compare as gate
    import history
    import interleave
finally:
    sys.path.remove(str(PERF))

BASELINES = PERF / "baselines"
RL_7B = BASELINES / "rl_7b_h200x2.NVIDIA_H200x2.json"
SECONDS = (1.00, 1.02, 0.99, 1.01, 1.00, 0.98, 1.03, 1.00, 1.01, 0.99)
ASKED = "behavior/requests"


def record(
    scale: float = 1.0, tokens: float = 1000.0, device: str = "NVIDIA H200", noise: float = 0.0, **changed: Any
) -> dict[str, Any]:
    times = [s * scale * (1 + noise * (-1) ** number) for number, s in enumerate(SECONDS)]
    steps = [{gate.TOKENS: tokens, "timing_s/step": s + 5.0, "timing_s/save_checkpoint": 5.0} for s in times]
    made = {
        "case": "sft_7b_h200x2",
        "exit_code": 0,
        "steps": steps,
        "lengths": {"total": tokens * len(steps)},
        "summary": {"timing_s/step": scale},
        "provenance": {"commit": "0123456789", "hardware": {"devices": [device], "used": 2}},
    }
    return made | changed


def run(*words: object) -> Result:
    app = typer.Typer()
    app.command()(gate.compare)
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


def compare(folder: Path, head: dict[str, Any], base: dict[str, Any], *more: str) -> Result:
    for name, content in (("head", head), ("base", base)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return run(folder / "head.json", folder / "base.json", *more)


@pytest.mark.parametrize(
    ("head", "more", "code", "message"),
    [
        (record(1.02), (), 0, "no difference"),
        (record(1.10, noise=0.3), (), 0, "no difference"),
        (record(1.10), (), 1, "slower"),
        (record(0.80), (), 1, "faster, without --explained"),
        (record(0.80), ("--explained", "a fused kernel"), 0, "faster, as explained: a fused kernel"),
        (record(tokens=900.0), (), 2, "not comparable: 900 tokens per step, but 1000 in the baseline"),
        (record(device="NVIDIA H100"), (), 2, "hardware is NVIDIA_H100x2, but NVIDIA_H200x2 in the baseline"),
        (record(exit_code=1), (), 2, "has no measured steps or its run failed"),
        (record(exit_code=143, steps=[]), (), 2, "has no measured steps"),
        (record(case="sft_tiny_cpu"), (), 2, "case is sft_tiny_cpu"),
    ],
)
def test_an_unexplained_difference_beyond_the_threshold_fails_and_other_work_is_refused(
    tmp_path: Path, head: dict[str, Any], more: tuple[str, ...], code: int, message: str
):
    done = compare(tmp_path, head, record(), *more)
    assert done.exit_code == code and message in (done.stdout + done.stderr).replace("\n", " ")


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("settings", "train.mode", "async", "train.mode is 'async', but"),
        ("settings", "parallel.tp", 9, "parallel.tp is 9, but 2 in the baseline"),
        ("versions", "torch", "2.5.0", "torch is '2.5.0', but"),
        ("settings", "train.steps", 99, ""),
    ],
)
def test_a_change_of_a_measured_baseline_is_seen_unless_it_is_named(
    tmp_path: Path, part: str, key: str, value: Any, message: str
):
    made, base = (json.loads(RL_7B.read_text()) for _ in range(2))
    *sections, name = key.split(".")
    table = made["provenance"][part]
    for section in sections:
        table = table[section]
    table[name] = value
    done = compare(tmp_path, made, base)
    assert done.exit_code == (2 if message else 0) and message in done.stderr.replace("\n", " ")
    assert compare(tmp_path, made, base, "--changed", key).exit_code == 0, "a change on purpose"


@pytest.mark.parametrize("path", sorted(BASELINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_baseline_is_found_by_its_case_and_hardware(path: Path):
    done = run(path)
    assert done.exit_code == 0 and "seconds per token: 1.0000 of the baseline's" in done.stdout, done.stderr


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


@pytest.mark.parametrize(("slowed", "code"), [([], 0), ([0], 0), ([0, 3], 1)])
def test_a_difference_counts_when_it_is_found_twice(slowed: list[int], code: int):
    rounds = iter((record(1.5 if number in slowed else 1.0), record()) for number in range(4))

    def measure() -> Any:
        return [next(rounds), next(rounds)]

    assert interleave.confirm(measure, lambda pairs: interleave.report("case: {:.3f}", pairs, 0.03)) == code
    assert len(list(rounds)) == (0 if slowed else 2), "what finds nothing is not measured again"


def test_both_checkouts_run_in_each_round_in_alternating_order():
    times = iter(range(4))
    pairs = interleave.alternate(lambda root: {root.name: next(times)}, Path("head"), Path("base"), 2)
    assert pairs == [({"head": 1}, {"base": 0}), ({"head": 2}, {"base": 3})]


@pytest.mark.parametrize(("steps", "smallest"), [(3, 0.281), (20, 0.0296)])
def test_the_smallest_detectable_difference(steps: int, smallest: float):
    """RL's baselines have three steps: not 3 %."""
    rows = {"steps": record()["steps"][:1] * steps}
    counted, least = gate.detectable([(rows, rows)], gate.DEFAULT_THRESHOLD)
    assert counted == steps and least == pytest.approx(smallest, rel=0.005)


def test_the_history_is_read_and_a_selection_has_both_ends_its_topic_and_all_words():
    dates = [each.date for each in history.read()]
    assert len(dates) >= 58 and dates == sorted(dates)
    texts = {"commit": "0000000", "hardware": "H200", "kind": "measured", "command": "", "title": "Sandbox"}
    made = [{**texts, "date": f"2026-11-{day}", "topics": ["sandbox"], "text": "numpy 7.7 ms"} for day in range(20, 24)]
    made[2] |= {"topics": ["RL", "FP8"], "text": "sand"}
    records = [history.Record.model_validate(each) for each in made]
    for topic, words, days in (("", [], [21, 22]), ("FP8", [], [22]), ("", ["NUMPY", "sand"], [21])):
        found = history.select(records, topic, records[1].date, records[2].date, words)
        assert [each.date.day for each in found] == days
