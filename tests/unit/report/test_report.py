"""Reports show what the files contain, name what they lack, and let no name become markup."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.errors import ConfigError, DataError
from retool_mcore.report.build import write_report
from retool_mcore.report.charts import HEIGHT, MANY_POINTS, MAX_POINTS, WIDTH, Line, line_chart, thinned
from retool_mcore.report.evaluations import all_reports, before_and_after
from retool_mcore.report.facts import changed_settings
from retool_mcore.report.numbers import duration, number
from retool_mcore.report.record import read_run
from retool_mcore.report.sections import LOST, time_spent
from tests.unit.report.generated import QUICKSTART, steps, write_evaluation, write_run

SVG = "{http://www.w3.org/2000/svg}"
RUNS = [QUICKSTART / name for name in ("sft", "tool_rl", "text_rl")]


HOSTILE = "</td><script>alert(1)</script> & \"x\" 'y' \u202e | `z` [a](javascript:b)\n# heading"


class Page(HTMLParser):
    """The texts of each section, the tags, and the addresses that a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.sections: dict[str, list[str]] = {}
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "data", "action")]
        if tag == "section":
            self._section = values["id"] or ""

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.sections.setdefault(self._section, []).append(data.strip())

    def text(self, section: str) -> str:
        return " ".join(self.sections[section])


def page(tmp_path: Path, *runs: Path, evaluations: tuple[Path, ...] = ()) -> Page:
    out = tmp_path / "report.html"
    write_report(runs, out, evaluations)
    return Page(out.read_text(encoding="utf-8"))


def test_the_quickstarts_report_tells_what_happened(tmp_path: Path):
    made = page(tmp_path, *RUNS)
    assert list(made.sections)[1:] == [
        *("at-a-glance", "learning", "warnings"),
        *("the-models", "before-and-after"),
        *("behaviour", "dropped-cut-and-malformed", "throughput"),
        *("where-the-time-went", "settings", "versions-and-hardware"),
    ]
    text = (tmp_path / "report.html").read_text()
    assert text.index("<details>") > text.index('id="warnings"'), "the first sections are unfolded"
    assert "0.322 → 0.918" in made.text("at-a-glance") and "24 of 24" in made.text("at-a-glance")
    models = made.text("the-models")
    assert "sft with the tool 64 0.322 (0.281 to 0.363) sft text only" in models, "the first has no difference"
    assert "tool_rl with the tool 64 0.918 (0.895 to 0.941) +0.596 (+0.551 to +0.641)" in models
    assert "Loss, SFT" in made.text("learning") and "Accuracy, RL" in made.text("learning")
    assert "trajectories dropped by outages 0 0" in made.text("dropped-cut-and-malformed")
    assert not {"algorithm.clip", "optim.betas", "parallel.tp", "verl_overrides"} & set(made.text("settings").split())
    assert "rollout.max_turns" in made.text("settings")


def test_a_page_is_one_file_that_loads_nothing(tmp_path: Path):
    made = page(tmp_path, *RUNS)
    assert all(address.startswith("#") for address in made.addresses)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(made.tags)
    anchors = {address.removeprefix("#") for address in made.addresses}
    assert anchors == set(made.sections) - {""}
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text


def test_what_is_missing_is_named_and_not_made_up(tmp_path: Path):
    made = page(tmp_path, write_run(tmp_path / "bare", rows=[{"step": 1, "critic/rewards/mean": 0.5}]))
    assert "no evaluation of its export" in made.text("before-and-after")
    assert "Not recorded: Accuracy, Policy loss" in made.text("learning")
    assert (tmp_path / "report.html").read_text().count("No MFU of bare") == made.text("throughput").count("MFU") == 1
    assert "bare: the run recorded no phases" in made.text("where-the-time-went")
    assert "Not recorded." in made.text("dropped-cut-and-malformed")
    assert "the run did not record versions and hardware" in made.text("versions-and-hardware")


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_without_any_step_has_a_report(tmp_path: Path, kind: str):
    made = page(tmp_path, write_run(tmp_path / "empty", kind=kind))
    assert "0 of 10" in made.text("at-a-glance") and "svg" not in made.tags


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
    assert f"{first}, b and {third} {kinds}, from models/start and models/other" in made.text("")
    assert made.text("at-a-glance") == (
        f"At a glance {first} steps 7 of 10 killed: after step 7; no checkpoint accuracy 0.500 mean of the last 5 "
        "steps, on training prompts tokens per second 750 MFU 7.5% time per step 12 min 30 s median, without "
        "validation b steps 3 of 10 killed: after step 3; no checkpoint validation loss 1.667 nats per token; first "
        f"value: 5 tokens per second 20 {third} steps 0 of 10 killed: after step 0; no checkpoint held-out accuracy "
        "0.250 validation at step 0"
    )
    assert "tokens per second and device 75 not recorded not recorded" in made.text("throughput")
    assert f"No calls in {first}, {third}, so" in made.text("behaviour")
    assert f"No MFU of b, {third}: no row has it." in made.text("throughput")


def test_of_what_was_dropped_counts_are_added_and_shares_averaged(tmp_path: Path):
    shown = {
        "rollout/dropped": "trajectories dropped by outages 10",
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
    text = page(tmp_path, *runs, write_run(tmp_path / "sft", kind="sft")).text("dropped-cut-and-malformed")
    words = " ".join(f"{each} not recorded" for each in shown.values())
    named = "malformed calls per trajectory: no fence 0.125 0 reward part: own part 0.5 0"
    assert text.startswith(f"Dropped, cut and malformed over all steps a b {words} {named} At its start, SFT prints")


def marked(folder: Path) -> list[str]:
    """The first cells of the marked rows."""
    return re.findall(r'<tr class="marked"><td[^>]*>(.*?)</td>', (folder / "report.html").read_text())


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
    assert made.text("the-models").partition(" Gained / lost: ")[0] == (
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
    assert made.text("before-and-after").partition(" Intervals are ")[0] == (
        "Before and after run problems before after difference "
        f"a 4 problems, mean@4, {tool} 0.500 (0.450 to 0.550) 0.812 (0.762 to 0.863) +0.312 (+0.000 to +0.750) "
        "a 4 problems, mean@4, text only 0.250 (0.200 to 0.300) not evaluated "
        "a 2 problems, mean@4, text only not evaluated 0.750 (0.700 to 0.800) "
        "b 4 problems, mean@4, text only 0.250 (0.200 to 0.300) 0.500 (0.450 to 0.550) +0.250 (+0.000 to +0.750) "
        f"b 4 problems, mean@4, {tool} 0.500 (0.450 to 0.550) 0.250 (0.200 to 0.300) -0.250 (-0.750 to +0.000)"
    )
    assert marked(tmp_path) == ["a", "b", "rollout.tools", "run.name"]
    assert "held-out accuracy 0.500 → 0.812 4 problems, with the tool b " in made.text("at-a-glance")
    assert "held-out accuracy 0.250 → 0.500 4 problems, text only" in made.text("at-a-glance")


def test_settings_and_machines_of_two_runs_stand_side_by_side(tmp_path: Path):
    one = write_run(tmp_path / "one", cluster={"nodes": 2, "gpus_per_node": 8}, optim={"lr": 1e-3}, old={"key": True})
    two = write_run(tmp_path / "two", kind="sft", optim={"lr": 1e-3}, run={"platform": "cuda"})
    (one / "environment.json").write_text('{"versions": {"torch": "2.13.0"}, "hardware": {"driver": "580"}}')
    (two / "environment.json").write_text('{"versions": {"torch": "2.13.0", "verl": "0.9.1"}}')
    made = page(tmp_path, one, two)
    assert made.text("versions-and-hardware") == (
        "Versions and hardware hardware one two platform cpu cuda devices (nodes x GPUs) 2 x 8 1 x not recorded "
        "driver 580 not recorded versions one two torch 2.13.0 2.13.0 verl not recorded 0.9.1"
    )
    root = json.dumps(str(tmp_path))
    assert made.text("settings") == (
        f'Settings differs from the default one two default run.root {root} {root} "runs" cluster.nodes 2 not set 1 '
        "old.key true not set not a setting of this version "
        'has no default one two run.name "one" "two" run.platform "cpu" "cuda" cluster.gpus_per_node 8 not set '
        'model.path "models/start" "models/start" optim.lr 0.001 0.001 train.steps 10 10 '
        "Marked rows differ between the runs."
    )
    keys = ["cluster.nodes", "old.key", "run.name", "run.platform", "cluster.gpus_per_node"]
    assert marked(tmp_path) == [*keys, "platform", "devices (nodes x GPUs)", "driver", "verl"]


def drawn(svg: str) -> list[tuple[str, ...]]:
    """Tip, colour and dashes of each line; then text and dashes of the legend's entries."""
    lines = re.findall(r'<g style="color: var\(--series-(\d).*?<title>(.*?)</title>\n<path (.*?)/>', svg, re.DOTALL)
    keys = re.findall(r'y2="9" stroke-width="1.9"(.*?)/>\n<text [^>]*>(.*?)<', svg)
    found = [(tip, colour, path) for colour, tip, path in lines] + [(text, line) for line, text in keys]
    return [(*words, *re.findall(r'dasharray="(.*?)"', last)) for *words, last in found]


@pytest.mark.parametrize("form", [".html", ".md"])
def test_hostile_names_stay_text(tmp_path: Path, form: str):
    run = write_run(tmp_path / "run", rows=steps(4, accuracy=0.5), model={"path": HOSTILE}, run={"name": HOSTILE})
    write_evaluation(tmp_path / "eval", HOSTILE, [1, 2], data="<img src=x onerror=alert(1)>")
    out = tmp_path / f"report{form}"
    write_report([run], out)
    text = out.read_text(encoding="utf-8")
    assert "<script" not in text and "<img" not in text
    assert "alert(1)" in text, "it is shown"
    if form == ".md":
        assert "\n# heading" not in text
        assert "\\[a\\](javascript" in text and "\\`z\\`" in text
        (line,) = [line for line in text.splitlines() if line.startswith("| model.path")]
        assert len(re.findall(r"(?<!\\)\|", line)) == 3  # the name has not ended its cell


def test_markdown_has_its_pictures_beside_it(tmp_path: Path):
    out = tmp_path / "deep" / "a.md"
    for runs in (RUNS, RUNS[1:2]):  # the second time with fewer pictures
        write_report(runs, out)
    text = out.read_text(encoding="utf-8")
    named = re.findall(r"!\[[^\]]*\]\(([^ )]+)", text)
    assert len(named) > 15 and len(set(named)) == len(named)
    files = {f"a_pictures/{file.name}" for file in (out.parent / "a_pictures").iterdir()}
    assert files == set(named), "no picture is left from the time before"
    for name in named:
        assert ElementTree.parse(out.parent / name).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert "\n- steps: **24 of 24** (ended: exported)\n" in text
    assert "| tool\\_rl | 64 problems, mean@8, with the tool | 0.322 (0.281 to 0.363)" in "\n".join(table)


def test_another_ending_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"report.pdf: the name must end in \.html or \.md"):
        write_report(RUNS, tmp_path / "report.pdf")


def test_a_model_of_another_run_is_not_taken_for_this_ones(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    write_evaluation(tmp_path / "eval" / "other", f"{tmp_path}/run2/export", [1, 2])
    write_evaluation(tmp_path / "eval" / "start", "models/start2", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_newest_of_two_evaluations_of_one_model_counts(tmp_path: Path, names: tuple[str, str]):
    run = read_run(write_run(tmp_path / "run"))
    old, new = (write_evaluation(tmp_path / "eval" / name, f"{tmp_path}/run/export", [1, 2]) for name in names)
    for age, folder in ((100, old), (50, new)):
        os.utime(folder / "report.json", (1e9 - age, 1e9 - age))
    (pair,) = before_and_after(run, all_reports([run], ())[0])
    assert pair.after and pair.after.path.parent == new


def test_a_foreign_report_beside_a_run_is_a_note_and_a_named_one_an_error(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "report.json").write_text('{"coverage": 1}')
    reports, (note,) = all_reports([run], ())
    assert not reports and "plots/report.json: not a report of `retool eval`" in note
    assert f"Omitted: {tmp_path}/plots/report.json" in page(tmp_path, run.path).text("before-and-after")
    with pytest.raises(DataError, match="not a report of `retool eval`"):
        all_reports([run], [tmp_path / "plots"])
    with pytest.raises(DataError, match=r"nor its folders contain a report.json"):
        all_reports([run], [tmp_path / "run"])


def test_a_folder_named_by_the_user_is_searched_too(tmp_path: Path):
    run = read_run(write_run(tmp_path / "runs" / "run"))
    far = write_evaluation(tmp_path / "far" / "deep" / "after", f"{tmp_path}/runs/run/export", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []
    for named in (tmp_path / "far", far / "report.json"):
        (pair,) = before_and_after(run, all_reports([run], [named])[0])
        assert pair.after and pair.after.path.parent == far


def test_validations_of_several_runs_stand_side_by_side_with_intervals(tmp_path: Path):
    runs = []
    for name, first, last in (("with_tool", 0.25, 0.75), ("without_tool", 0.25, 0.5)):
        rows = steps(3, accuracy=first)
        for row, accuracy in ((rows[0], first), (rows[1], 0.8), (rows[2], last)):
            row |= {"val/accuracy": accuracy, "val/accuracy/low": accuracy - 0.1, "val/accuracy/high": accuracy + 0.1}
        runs.append(write_run(tmp_path / name, rows=rows))
    sft = write_run(tmp_path / "sft", kind="sft", rows=steps(3, accuracy=1.0))
    made = page(tmp_path, sft, *runs)
    text = made.text("before-and-after")
    both = "step 1: 0.250 (0.150 to 0.350)", "step 2: 0.800 (0.700 to 0.900)"
    assert f"with_tool {both[0]} step 3: 0.750 (0.650 to 0.850) {both[1]}" in text
    assert f"without_tool {both[0]} step 3: 0.500 (0.400 to 0.600) {both[1]}" in text
    glance = made.text("at-a-glance")
    assert "0.250 → 0.750 validation at step 3, 95 %: 0.650 to 0.850" in glance and "0.250 → 0.500" in glance
    assert drawn((tmp_path / "report.html").read_text()) == [
        *(("with_tool train: 0.25 at step 3", "1"), ("with_tool validation: 0.75 at step 3", "1", "5 3")),
        *(("without_tool train: 0.25 at step 3", "2"), ("without_tool validation: 0.5 at step 3", "2", "5 3")),
        *(("with_tool",), ("without_tool",), ("train",), ("validation", "5 3")),
    ]
    page(tmp_path, runs[0])
    assert drawn((tmp_path / "report.html").read_text()) == [
        *(("with_tool train: 0.25 at step 3", "0"), ("with_tool validation: 0.75 at step 3", "1")),
        *(("train",), ("validation",)),
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
    text = page(tmp_path, run, write_run(tmp_path / "other", kind="sft")).text("where-the-time-went")
    whole = 30 + 10 + 3 * 10 + 100  # the first start and step, three steps on, the gap
    assert f"starts 1 min 10 s, {70 / whole:.0%} generation 18 s, {18 / whole:.0%}" in text
    assert f"{LOST} 1 min 0 s, {60 / whole:.0%}" in text and "2 min 50 s in total" in text
    seconds = {"starts": 70, "generation": 18, "between steps": 8, "other": 7.9, "tool wait": 4, "engine sleep": 2}
    seconds |= {"smaller phases": 0.1, LOST: 60}
    spent = time_spent(read_run(run))
    assert spent == pytest.approx(seconds) and list(spent) == list(seconds)


def test_a_default_that_is_another_keys_value_is_compared_with_that(tmp_path: Path):
    same = {"rollout": {"temperature": 0.6}, "validation": {"temperature": 0.6}}
    assert "validation.temperature" not in _changed(tmp_path / "same", **same)
    other = {"rollout": {"temperature": 0.6}, "validation": {"temperature": 1.0}}
    assert _changed(tmp_path / "other", **other)["validation.temperature"] == "1.0"


def _changed(folder: Path, **sections: Any) -> dict[str, str]:
    run = read_run(write_run(folder, **sections))
    return {setting.key: setting.values[0] for setting in changed_settings([run])}


NUMBERS = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(values=st.lists(NUMBERS, min_size=1, max_size=200), start=st.integers(0, 10**6), from_zero=st.booleans())
def test_every_point_is_inside_the_picture(values: list[float], start: int, from_zero: bool):
    points = [(start + index, value) for index, value in enumerate(values)]
    svg = line_chart([Line(label="a", points=points)], from_zero=from_zero, title="t")
    tree = ElementTree.fromstring(svg)
    paths = [path.attrib["d"] for path in tree.iter(f"{SVG}path")]
    assert len(paths) == (2 if len(points) >= MANY_POINTS else 1)
    for path in paths:
        places = [[float(each) for each in pair.split()] for pair in re.split("[ML]", path)[1:]]
        assert len(places) == len(points)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_a_higher_value_is_drawn_higher_and_a_later_step_further_right():
    svg = line_chart([Line(label="a", points=[(1, 0.0), (2, 1.0), (4, 0.5)])], title="t")
    path = next(ElementTree.fromstring(svg).iter(f"{SVG}path")).attrib["d"]
    (x1, y1), (x2, y2), (x3, y3) = ([float(each) for each in pair.split()] for pair in re.split("[ML]", path)[1:])
    assert y2 < y3 < y1 and abs((x3 - x2) - 2 * (x2 - x1)) < 0.5
    circle = next(ElementTree.fromstring(svg).iter(f"{SVG}circle")).attrib
    assert [float(circle[name]) for name in ("cx", "cy")] == [x3, y3]


def test_ticks_are_round_and_hold_all_values():
    svg = line_chart([Line(label="a", points=[(1, 0.34), (24, 0.94)])], title="t")
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts == ["0", "0.25", "0.5", "0.75", "1", "1", "10", "20", "24"]
    svg = line_chart([Line(label="a", points=[(1, 10.0), (5, 10.002)])], from_zero=False, least=1.0, title="t")
    tree = ElementTree.fromstring(svg)
    texts = [(text.text, text.attrib["x"], text.attrib["y"]) for text in tree.iter(f"{SVG}text")]
    assert [each[0] for each in texts] == ["10", "10.25", "10.5", "10.75", "11", "1", "2", "3", "4", "5"]
    assert texts[:5:4] == [("10", "39.0", "169.5"), ("11", "39.0", "15.5")]
    assert texts[5::2] == [("1", "46.0", "182.0"), ("3", "216.0", "182.0"), ("5", "386.0", "182.0")]


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
