"""Reports show what the files contain, name what they lack, and let no name become markup."""

import json
import os
import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from retool_mcore.errors import DataError
from retool_mcore.report.build import write_report
from retool_mcore.report.charts import MAX_POINTS, Line, line_chart, thinned
from retool_mcore.report.evaluations import all_reports, before_and_after
from retool_mcore.report.facts import changed_settings
from retool_mcore.report.numbers import duration, number
from retool_mcore.report.record import read_run
from retool_mcore.report.sections import LOST, time_spent
from tests.unit.report.generated import QUICKSTART, steps, write_evaluation, write_run

SVG = "{http://www.w3.org/2000/svg}"
RUNS = [QUICKSTART / name for name in ("sft", "tool_rl", "text_rl")]


HOSTILE = "</td><script>alert(1)</script> & \"x\" 'y' \u202e | `z` [a](javascript:b)\n# heading"


def page(tmp_path: Path, *runs: Path) -> dict[str, str]:
    """The text of each section by its id, and under "" what stands before the first."""
    out = tmp_path / "report.html"
    write_report(runs, out)
    first, *rest = re.split(r'<section id="([^"]+)"[^>]*>', out.read_text(encoding="utf-8"))
    parts = {"": first} | dict(zip(rest[::2], rest[1::2], strict=True))
    return {name: " ".join(unescape(re.sub(r"<[^>]*>", " ", part)).split()) for name, part in parts.items()}


def test_the_quickstarts_report_is_one_file_that_loads_nothing_and_tells_what_happened(tmp_path: Path):
    made = page(tmp_path, *RUNS)
    assert "0.322 → 0.918" in made["at-a-glance"] and "24 of 24" in made["at-a-glance"]
    models = made["the-models"]
    assert "sft with the tool 64 0.322 (0.281 to 0.363) sft text only" in models, "the first has no difference"
    assert "tool_rl with the tool 64 0.918 (0.895 to 0.941) +0.596 (+0.551 to +0.641)" in models
    assert "Loss, SFT" in made["learning"] and "Accuracy, RL" in made["learning"]
    assert "trajectories dropped 0 0" in made["dropped-cut-and-malformed"]
    assert not {"algorithm.clip", "optim.betas", "parallel.tp", "verl_overrides"} & set(made["settings"].split())
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    loaded = re.findall(r' (?:href|src|srcset|data|action)="([^"]*)"', text)
    assert {address.removeprefix("#") for address in loaded} == set(made) - {""}
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(re.findall(r"<(\w+)", text))
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text


def test_what_is_missing_is_named_and_not_made_up(tmp_path: Path):
    bare = write_run(tmp_path / "bare", rows=[{"step": 1, "critic/rewards/mean": 0.5}])
    made = page(tmp_path, bare, write_run(tmp_path / "empty", kind="sft"))
    assert "empty steps 0 of 10" in made["at-a-glance"]
    assert "bare: found no evaluation of its export" in made["before-and-after"]
    assert "Not recorded: Accuracy, RL, Policy loss, RL" in made["learning"]
    assert "bare: the run recorded no phases" in made["where-the-time-went"]


def test_the_tiles_are_of_the_steps_after_the_first_and_of_the_last_five(tmp_path: Path):
    rows = steps(7)
    for row, rate in zip(rows, (9.0, 100.0, 300.0, 1200.0, 200.0, 5000.0, 8000.0), strict=True):
        row |= {"tokens_per_s": rate, "mfu": rate / 1e4, "timing_s/step": rate, "accuracy": row["step"] / 10}
        row["perf/throughput"] = rate / 10
    sft = [{"step": n, "loss": 9.0, "val_loss": 5.0 / n, "tokens_per_s": 10.0 * n} for n in (1, 2, 3)]
    first = write_run(tmp_path / "a", rows=rows)
    second = write_run(tmp_path / "b", kind="sft", rows=sft, model={"path": "models/other"})
    third = write_run(tmp_path / "deep" / "a", rows=[{"step": 0, "val/accuracy": 0.25}])
    made = page(tmp_path, first, second, third)
    kinds = "Reinforcement learning, supervised fine-tuning"
    assert f"{first}, b and {third} {kinds}, from models/start and models/other" in made[""]
    assert made["at-a-glance"] == (
        f"At a glance {first} steps 7 of 10 killed: after step 7; no checkpoint accuracy 0.500 mean of the last 5 "
        "steps, on training prompts tokens per second 750 MFU 7.5% time per step 12 min 30 s median, without "
        "validation b steps 3 of 10 killed: after step 3; no checkpoint validation loss 1.667 nats per token; first "
        f"value: 5 tokens per second 20 {third} steps 0 of 10 killed: after step 0; no checkpoint held-out accuracy "
        "0.250 validation at step 0"
    )
    assert "tokens per second and device 75 not recorded not recorded" in made["throughput"]
    assert f"No calls in {first}, {third}, so" in made["behaviour"]
    assert f"No MFU of b, {third}: no row has it." in made["throughput"]


def test_of_what_was_dropped_counts_are_added_and_shares_averaged(tmp_path: Path):
    shown = {
        "rollout/dropped": "trajectories dropped 10",
        "rollout/refilled_prompts": "replacement prompts 20",
        "training/filter_groups/discarded_surplus_samples": "surplus trajectories of algorithm.filter_groups 30",
        "behavior/stop/length": "responses cut off at the token limit (mean share) 10",
        "behavior/stop/no_room": "responses ended because a result did not fit (mean share) 12.5",
        "behavior/stop/turns": "responses ended by the limit of turns (mean share) 15",
        "behavior/stop/malformed_calls": "responses ended by malformed calls (mean share) 17.5",
        "behavior/stop/tool_time": "responses ended by the limit of tool time (mean share) 20",
        "behavior/cut_tokens": "tokens cut from results, per trajectory 22.5",
        "reward/check_failed": "answers whose check failed (mean share) 25",
    }
    rows = steps(4)
    for row in rows:
        row |= {metric: place * row["step"] for place, metric in enumerate(shown, 1)}
    rows[1] |= {"behavior/malformed/no_fence": 0.5, "reward/own_part": 2.0}  # 0 in the other steps
    runs = write_run(tmp_path / "a", rows=rows), write_run(tmp_path / "b", rows=steps(1))
    text = page(tmp_path, *runs)["dropped-cut-and-malformed"]
    words = " ".join(f"{each} not recorded" for each in shown.values())
    named = "malformed calls per trajectory: no fence 0.125 0 reward part: own part 0.5 0"
    assert text == f"Dropped, cut and malformed over all steps a b {words} {named}"


def test_models_are_compared_on_each_set_of_problems(tmp_path: Path):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", rollout={"tools": []})
    evaluations = [
        ("models/start", True, [0, 0, 4, 4]),
        ("models/start", False, [0, 0, 0, 4]),
        (f"{runs[0]}/export", True, [4, 1, 4, 4]),
        (f"{runs[1]}/export", False, [4, 0, 0, 4]),
    ]
    for place, (model, tool, right) in enumerate(evaluations):
        write_evaluation(tmp_path / "evaluations" / str(place), model, right, tool=tool)
    write_evaluation(runs[1] / "eval" / "b", f"{runs[1]}/export", [0, 0, 4, 0])
    write_evaluation(runs[0] / "eval" / "a", f"{runs[0]}/export", [4, 2], tool=False, data="other.parquet")
    made = page(tmp_path, *runs)
    start, tool = "start model (start)", "with the tool"
    assert made["the-models"].partition(" Gained / lost: ")[0] == (
        "The models Problems: held_out.parquet model tool problems accuracy difference to the first "
        f"{start} {tool} 4 0.500 (0.450 to 0.550) {start} text only 4 0.250 (0.200 to 0.300) "
        f"a {tool} 4 0.812 (0.762 to 0.863) +0.312 (+0.000 to +0.750) "
        f"b {tool} 4 0.250 (0.200 to 0.300) -0.250 (-0.750 to +0.000) "
        "b text only 4 0.500 (0.450 to 0.550) +0.250 (+0.000 to +0.750) paired by problem difference gained / lost "
        f"{start}: text only, then {tool} +0.250 (+0.000 to +0.750) 1 / 0 "
        f"b: text only, then {tool} -0.250 (-1.000 to +0.500) 1 / 2 "
        f"a, {tool}, then b, text only -0.312 (-0.750 to +0.000) 0 / 1 "
        f"a, {tool}, then b, {tool} -0.562 (-1.000 to -0.125) 0 / 2"
    )
    assert made["before-and-after"].partition(" Intervals are ")[0] == (
        "Before and after run problems before after difference "
        f"a 4 problems, mean@4, {tool} 0.500 (0.450 to 0.550) 0.812 (0.762 to 0.863) +0.312 (+0.000 to +0.750) "
        "a 4 problems, mean@4, text only 0.250 (0.200 to 0.300) not evaluated "
        "a 2 problems, mean@4, text only not evaluated 0.750 (0.700 to 0.800) "
        "b 4 problems, mean@4, text only 0.250 (0.200 to 0.300) 0.500 (0.450 to 0.550) +0.250 (+0.000 to +0.750) "
        f"b 4 problems, mean@4, {tool} 0.500 (0.450 to 0.550) 0.250 (0.200 to 0.300) -0.250 (-0.750 to +0.000)"
    )
    assert "held-out accuracy 0.500 → 0.812 4 problems, with the tool b " in made["at-a-glance"]
    assert "held-out accuracy 0.250 → 0.500 4 problems, text only" in made["at-a-glance"]


def test_settings_and_machines_of_two_runs_stand_side_by_side(tmp_path: Path):
    one = write_run(tmp_path / "one", cluster={"nodes": 2, "gpus_per_node": 8}, optim={"lr": 1e-3}, old={"key": True})
    two = write_run(tmp_path / "two", kind="sft", optim={"lr": 1e-3}, run={"platform": "cuda"})
    (one / "environment.json").write_text('{"versions": {"torch": "2.13.0"}, "hardware": {"driver": "580"}}')
    (two / "environment.json").write_text('{"versions": {"torch": "2.13.0", "verl": "0.9.1"}}')
    made = page(tmp_path, one, two)
    assert made["versions-and-hardware"] == (
        "Versions and hardware hardware one two platform cpu cuda devices (nodes x GPUs) 2 x 8 1 x not recorded "
        "driver 580 not recorded versions one two torch 2.13.0 2.13.0 verl not recorded 0.9.1"
    )
    root = json.dumps(str(tmp_path))
    assert made["settings"] == (
        f'Settings differs from the default one two default run.root {root} {root} "runs" cluster.nodes 2 not set 1 '
        "old.key true not set not a setting of this version "
        'has no default one two run.name "one" "two" run.platform "cpu" "cuda" cluster.gpus_per_node 8 not set '
        'model.path "models/start" "models/start" optim.lr 0.001 0.001 train.steps 10 10 '
        "Marked rows differ between the runs."
    )
    marked = re.findall(r'<tr class="marked"><td[^>]*>(.*?)</td>', (tmp_path / "report.html").read_text())
    keys = ["cluster.nodes", "old.key", "run.name", "run.platform", "cluster.gpus_per_node"]
    assert marked == [*keys, "platform", "devices (nodes x GPUs)", "driver", "verl"]


@pytest.mark.parametrize("form", [".html", ".md"])
def test_hostile_names_stay_text(tmp_path: Path, form: str):
    run = write_run(tmp_path / "run", rows=steps(4, accuracy=0.5), model={"path": HOSTILE}, run={"name": HOSTILE})
    write_evaluation(tmp_path / "eval", HOSTILE, [1, 2], data="<img src=x onerror=alert(1)>")
    out = tmp_path / f"report{form}"
    write_report([run], out)
    text = out.read_text(encoding="utf-8")
    assert "<script" not in text and "<img" not in text and "alert(1)" in text
    if form == ".md":
        assert "\n# heading" not in text and "\\[a\\](javascript" in text and "\\`z\\`" in text
        (line,) = [line for line in text.splitlines() if line.startswith("| model.path")]
        assert len(re.findall(r"(?<!\\)\|", line)) == 3  # the name has not ended its cell


def test_markdown_has_its_pictures_beside_it(tmp_path: Path):
    out = tmp_path / "deep" / "a.md"
    for runs in (RUNS, RUNS[1:2]):  # the second time with fewer pictures
        write_report(runs, out)
    text = out.read_text(encoding="utf-8")
    named = re.findall(r"!\[[^\]]*\]\(([^ )]+)", text)
    files = {f"a_pictures/{file.name}" for file in (out.parent / "a_pictures").iterdir()}
    assert len(named) > 15 and files == set(named), "no picture is left from the time before"
    for name in named:
        assert ElementTree.parse(out.parent / name).getroot().tag == f"{SVG}svg"
    assert "\n- steps: **24 of 24** (ended: exported)\n" in text


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_newest_evaluation_of_the_runs_own_model_counts(tmp_path: Path, names: tuple[str, str]):
    run = read_run(write_run(tmp_path / "run"))
    write_evaluation(tmp_path / "eval" / "other", f"{tmp_path}/run2/export", [1, 2])
    write_evaluation(tmp_path / "eval" / "start", "models/start2", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []
    old, new = (write_evaluation(tmp_path / "eval" / name, f"{tmp_path}/run/export", [1, 2]) for name in names)
    for age, folder in ((100, old), (50, new)):
        os.utime(folder / "report.json", (1e9 - age, 1e9 - age))
    (pair,) = before_and_after(run, all_reports([run], ())[0])
    assert pair.after and pair.after.path.parent == new


def test_a_folder_named_by_the_user_is_searched_too_and_a_foreign_report_in_it_is_an_error(tmp_path: Path):
    run = read_run(write_run(tmp_path / "runs" / "run"))
    far = write_evaluation(tmp_path / "far" / "deep" / "after", f"{tmp_path}/runs/run/export", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []
    for named in (tmp_path / "far", far / "report.json"):
        (pair,) = before_and_after(run, all_reports([run], [named])[0])
        assert pair.after and pair.after.path.parent == far
    plots = tmp_path / "runs" / "plots"
    plots.mkdir()
    (plots / "report.json").write_text('{"coverage": 1}')
    assert f"Omitted: {plots}/report.json" in page(tmp_path, run.path)["before-and-after"]
    for named, message in (
        (plots, "not a report of `retool eval`"),
        (run.path, r"nor its folders contain a report.json"),
    ):
        with pytest.raises(DataError, match=message):
            all_reports([run], [named])


def test_validations_of_several_runs_stand_side_by_side_with_intervals(tmp_path: Path):
    runs = []
    for name, last in (("with_tool", 0.75), ("without_tool", 0.5)):
        rows = steps(3, accuracy=0.25)
        for row, accuracy in zip(rows, (0.25, 0.8, last), strict=True):
            row |= {"val/accuracy": accuracy, "val/accuracy/low": accuracy - 0.1, "val/accuracy/high": accuracy + 0.1}
        runs.append(write_run(tmp_path / name, rows=rows))
    made = page(tmp_path, *runs)
    text = made["before-and-after"]
    both = "step 1: 0.250 (0.150 to 0.350)", "step 2: 0.800 (0.700 to 0.900)"
    assert f"with_tool {both[0]} step 3: 0.750 (0.650 to 0.850) {both[1]}" in text
    assert f"without_tool {both[0]} step 3: 0.500 (0.400 to 0.600) {both[1]}" in text
    glance = made["at-a-glance"]
    assert "0.250 → 0.750 validation at step 3, 95 %: 0.650 to 0.850" in glance and "0.250 → 0.500" in glance
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'<g style="color: var\(--series-(\d).*?<title>(.*?)</title>', html, re.DOTALL) == [
        *(("0", "with_tool train: 0.25 at step 3"), ("0", "with_tool validation: 0.75 at step 3")),
        *(("1", "without_tool train: 0.25 at step 3"), ("1", "without_tool validation: 0.5 at step 3")),
    ]


def test_hours_are_told_over_the_whole_run_with_what_a_kill_lost(tmp_path: Path):
    rows = steps(4, seconds=10.0, **{"timing_s/step": 8.0, "timing_s/gen": 6.0, "timing_s/other": 2.0})
    for row in rows:
        row |= {"timing_s/tool_wait": 1.0, "timing_s/engine_sleep": 0.5, "timing_s/between_steps": 2.0}  # gen has two
    rows[0] |= {"timing_s/start": 30.0, "timing_s/start/ray": 30.0, "timing_s/other": 1.9, "timing_s/adv": 0.1}
    for row in rows[2:]:
        row["unix_s"] += 100.0  # killed after step 2, started again
    rows[2] |= {"timing_s/start": 40.0}
    before = {"step": 0, "unix_s": rows[0]["unix_s"] - 35.0, "timing_s/testing": 25.0}  # is in the first start
    run = write_run(tmp_path / "run", rows=[before, *rows])
    text = page(tmp_path, run)["where-the-time-went"]
    whole = 30 + 10 + 3 * 10 + 100  # the first start and step, three steps on, the gap
    assert f"starts 1 min 10 s, {70 / whole:.0%} generation 18 s, {18 / whole:.0%}" in text
    assert f"{LOST} 1 min 0 s, {60 / whole:.0%}" in text and "2 min 50 s in total" in text
    seconds = {"starts": 70, "generation": 18, "between steps": 8, "other": 7.9, "tool wait": 4, "engine sleep": 2}
    seconds |= {"smaller phases": 0.1, LOST: 60}
    spent = time_spent(read_run(run))
    assert spent == pytest.approx(seconds) and list(spent) == list(seconds)


@pytest.mark.parametrize(("validation", "shown"), [(0.6, None), (1.0, "1.0")])
def test_a_default_that_is_another_keys_value_is_compared_with_that(tmp_path: Path, validation: float, shown: Any):
    sections = {"rollout": {"temperature": 0.6}, "validation": {"temperature": validation}}
    changed = {each.key: each.values[0] for each in changed_settings([read_run(write_run(tmp_path, **sections))])}
    assert changed.get("validation.temperature") == shown


def test_a_higher_value_is_drawn_higher_and_a_later_step_further_right():
    svg = line_chart([Line(label="a", points=[(1, 0.34), (2, 0.94), (4, 0.6)])], title="t")
    tree = ElementTree.fromstring(svg)
    path = next(tree.iter(f"{SVG}path")).attrib["d"]
    (x1, y1), (x2, y2), (x3, y3) = ([float(each) for each in pair.split()] for pair in re.split("[ML]", path)[1:])
    assert y2 < y3 < y1 and abs((x3 - x2) - 2 * (x2 - x1)) < 0.5
    circle = next(tree.iter(f"{SVG}circle")).attrib
    assert [float(circle[name]) for name in ("cx", "cy")] == [x3, y3]
    places = {text.text: float(text.attrib["y"]) for text in tree.iter(f"{SVG}text")}
    assert list(places) == ["0", "0.25", "0.5", "0.75", "1", "2", "3", "4"]
    assert places["0.75"] < places["0.5"], "round ticks from 0, a higher one drawn higher"


def test_a_long_run_has_a_small_chart_that_keeps_its_peaks():
    points = [(step, 1.0) for step in range(50_000)]
    points[31_234] = (31_234, 9.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS and (31_234, 9.0) in kept and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]


def test_numbers_have_four_digits_and_durations_two_units():
    values = (0.0, 0.123456, -1234.6, 9_999_999.0, 12_345_678.0, 0.001, 0.00098765, -0.00098765)
    assert [number(value) for value in values] == [
        *("0", "0.1235", "-1,235", "9,999,999", "1.23e7", "0.001", "9.88e-4", "-9.88e-4"),
    ]
    seconds = (0.0123, 9.87, 10.4, 59.6, 150.0, 3599.7, 11_130.0, 86_399.0, 187_300.0)
    assert [duration(value) for value in seconds] == [
        *("0.012 s", "9.9 s", "10 s", "1 min 0 s", "2 min 30 s", "1 h 0 min", "3 h 5 min", "23 h 59 min", "2 d 4 h"),
    ]
