"""What a report tells of runs by their own files: validations, examples, where the time went."""

import json
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.report.sections import LEFT, spent
from tests.unit.report.generated import NOW_S, steps, write_rows, write_run
from tests.unit.report.test_build import page

RECORD = json.loads(
    (Path(__file__).parents[2] / "report/view/run/trajectories/trajectories.jsonl").read_text().splitlines()[0]
)


def validation(step: int, prompt: str, right: bool, said: str, call: bool = False) -> dict[str, Any]:
    results = [{"code": "print(1)", "ok": True, "status": "finished", "shown": f"shown {said}"}] if call else []
    turns = [{**RECORD["turns"][0], "text": said, "results": results}]
    more = {"key": f"{step}-{prompt}_0_0", "step": step, "partition": "val", "prompt": prompt, "turns": turns}
    return {**RECORD, **more, "reward_info": {"acc": float(right)}}


def with_trajectories(run: Path, *rows: dict[str, Any]) -> Path:
    (run / "trajectories").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "trajectories/trajectories.jsonl").write_text(text)
    return run


def test_a_run_without_evaluations_shows_problems_that_its_validations_have_before_and_after(tmp_path: Path):
    rows = [
        validation(0, "one and one?", False, "three of zero"),
        validation(0, "never mended?", False, "wrong of zero"),
        validation(0, "lost?", True, "right of zero"),
        validation(2, "one and one?", True, "two of step two"),
        validation(4, "one and one?", True, "two of step four", call=True),
        validation(4, "never mended?", False, "wrong of four"),
        validation(4, "lost?", False, "wrong again"),
    ]
    made = page(tmp_path, with_trajectories(write_run(tmp_path / "run", rows=steps(4, reward=0.5)), *rows))
    text = made.text("trajectories-before-and-after")
    assert "run, example 1: validation of step 0, then of step 4." in text and "example 2" not in text
    assert text.index("three of zero") < text.index("two of step four") < text.index("shown two of step four")
    assert "two of step two" not in text and "never mended?" not in text and "lost?" not in text


def test_one_validation_has_no_before_and_after(tmp_path: Path):
    run = with_trajectories(
        write_run(tmp_path / "run"), validation(4, "a?", False, "x"), validation(4, "a?", True, "y")
    )
    assert "None: they need" in page(tmp_path, run).text("trajectories-before-and-after")


def test_validations_of_several_runs_stand_side_by_side_with_intervals(tmp_path: Path):
    runs = []
    for name, first, last in (("with_tool", 0.25, 0.75), ("in_words", 0.25, 0.5)):
        rows = steps(3, reward=0.0)
        for row, accuracy in ((rows[0], first), (rows[1], 0.8), (rows[2], last)):
            row |= {"val/accuracy": accuracy, "val/accuracy/low": accuracy - 0.1, "val/accuracy/high": accuracy + 0.1}
        runs.append(write_run(tmp_path / name, rows=rows))
    made = page(tmp_path, *runs)
    text = made.text("before-and-after")
    assert "with_tool step 1: 0.250 (0.150 to 0.350) step 3: 0.750 (0.650 to 0.850) step 2: 0.800" in text
    assert "in_words step 1: 0.250 (0.150 to 0.350) step 3: 0.500 (0.400 to 0.600) step 2: 0.800" in text
    glance = made.text("at-a-glance")
    assert "0.250 → 0.750 validation at step 3, 95 %: 0.650 to 0.850" in glance and "0.250 → 0.500" in glance


def test_hours_are_told_over_the_whole_run_with_what_a_kill_lost(tmp_path: Path):
    rows = steps(4, seconds=10.0, **{"timing_s/step": 8.0, "timing_s/gen": 6.0, "timing_s/other": 2.0})
    for row in rows:
        row["timing_s/between_steps"] = 2.0
    rows[0] |= {"timing_s/start": 30.0, "timing_s/start/ray": 30.0}
    for row in rows[2:]:
        row["unix_s"] += 100.0  # killed after step 2, started again
    rows[2] |= {"timing_s/start": 40.0}
    run = write_run(tmp_path / "run", rows=rows)
    text = page(tmp_path, run, write_run(tmp_path / "other", kind="sft")).text("where-the-time-went")
    whole = 30 + 10 + 3 * 10 + 100  # the first start and step, three steps on, the gap
    assert f"starts 1 min 10 s, {70 / whole:.0%} generation 24 s, {24 / whole:.0%}" in text
    assert f"{LEFT} 1 min 0 s, {60 / whole:.0%} all 2 min 50 s" in text


def test_without_times_there_is_no_table(tmp_path: Path):
    from retool_mcore.report.record import read_run

    run = write_run(tmp_path / "run", rows=[{"step": 1, "unix_s": NOW_S, "critic/rewards/mean": 1.0}])
    assert spent(read_run(run)) == {}
    write_rows(run, [{"step": 1, "timing_s/other": 3.0}])
    assert spent(read_run(run)) == pytest.approx({"other": 3.0})
