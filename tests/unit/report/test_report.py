"""Reports show what the files contain, name what they lack, and let no name become markup."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.config.reference import reference
from retool_mcore.errors import ConfigError, DataError
from retool_mcore.report.build import write_report
from retool_mcore.report.charts import HEIGHT, MANY_POINTS, MAX_POINTS, WIDTH, Line, line_chart, thinned
from retool_mcore.report.evaluations import all_reports, before_and_after
from retool_mcore.report.facts import changed_settings
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
    assert "0.322 → 0.918" in made.text("at-a-glance") and "24 of 24" in made.text("at-a-glance")
    assert "+0.596 (+0.551 to +0.641)" in made.text("before-and-after")
    models = made.text("the-models")
    assert "sft with the tool 64 0.322 (0.281 to 0.363) sft text only" in models, "the first has no difference"
    assert "tool_rl with the tool 64 0.918 (0.895 to 0.941) +0.596 (+0.551 to +0.641)" in models
    assert "sft: text only, then with the tool +0.322 (+0.281 to +0.363) 6 / 0" in models
    assert "tool_rl, with the tool, then text_rl, text only -0.918 (-0.941 to -0.895) 0 / 64" in models
    assert "Loss, SFT" in made.text("learning") and "Accuracy, RL" in made.text("learning")
    for title in ("Code ratio", "Lines of code", "Code pass rate", "Position of the first call"):
        assert title in made.text("behaviour")
    for title in ("Response length", "Self-corrections"):
        assert title in made.text("behaviour")
    assert "update actor" in made.text("where-the-time-went")
    assert "trajectories dropped by outages 0 0" in made.text("dropped-cut-and-malformed")
    assert "algorithm.clip" not in made.text("settings") and "rollout.max_turns" in made.text("settings")


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
    assert "Not recorded: Code ratio" in made.text("behaviour")
    assert "No MFU of bare" in made.text("throughput")
    assert "bare: the run recorded no phases" in made.text("where-the-time-went")
    assert "Not recorded." in made.text("dropped-cut-and-malformed")
    assert "the run did not record versions and hardware" in made.text("versions-and-hardware")


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_without_any_step_has_a_report(tmp_path: Path, kind: str):
    made = page(tmp_path, write_run(tmp_path / "empty", kind=kind))
    assert "0 of 10" in made.text("at-a-glance") and "svg" not in made.tags


def test_mfu_and_the_machine_are_told_where_they_were_recorded(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(5, mfu=0.41, tokens_per_s=1000.0, **{"timing_s/step": 3.0}))
    (run / "environment.json").write_text('{"versions": {"torch": "2.13.0"}, "hardware": {"driver": "8 x H200"}}')
    made = page(tmp_path, run)
    assert "MFU 41.0%" in made.text("at-a-glance") and "No MFU" not in made.text("throughput")
    assert "8 x H200" in made.text("versions-and-hardware") and "2.13.0" in made.text("versions-and-hardware")


def test_warnings_malformed_calls_and_the_parts_of_an_own_reward_are_in_the_report(tmp_path: Path):
    metrics = {"actor/grad_norm": 0.0, "behavior/malformed/json": 0.5, "behavior/calls": 0.5, "reward/tests": 0.25}
    made = page(tmp_path, write_run(tmp_path / "run", rows=steps(4, **metrics)))
    assert "grad_norm of step 4 is 0" in made.text("warnings")
    assert "50% of the calls of the last 4 steps were malformed" in made.text("warnings")
    assert "malformed calls per trajectory: json 0.5" in made.text("dropped-cut-and-malformed")
    assert "reward part: tests 0.25" in made.text("dropped-cut-and-malformed")
    text = (tmp_path / "report.html").read_text()
    assert text.index("</details>") > text.index('id="warnings"') > text.index('id="learning"')
    assert text.count("MFU") == 1


def test_dropped_trajectories_add_up_over_steps(tmp_path: Path):
    rows = steps(4, **{"rollout/dropped": 2.0, "behavior/stop/length": 0.25})
    text = page(tmp_path, write_run(tmp_path / "run", rows=rows)).text("dropped-cut-and-malformed")
    assert "trajectories dropped by outages 8" in text and "cut off at the token limit (mean share) 0.25" in text


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
    with pytest.raises(DataError, match="not a report of `retool eval`"):
        all_reports([run], [tmp_path / "plots"])
    with pytest.raises(DataError, match=r"nor its folders contain a report.json"):
        all_reports([run], [tmp_path / "run"])


def test_a_folder_named_by_the_user_is_searched_too(tmp_path: Path):
    run = read_run(write_run(tmp_path / "runs" / "run"))
    far = write_evaluation(tmp_path / "far" / "deep" / "after", f"{tmp_path}/runs/run/export", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []
    (pair,) = before_and_after(run, all_reports([run], [tmp_path / "far"])[0])
    assert pair.after and pair.after.path.parent == far


def test_validations_of_several_runs_stand_side_by_side_with_intervals(tmp_path: Path):
    runs = []
    for name, first, last in (("with_tool", 0.25, 0.75), ("without_tool", 0.25, 0.5)):
        rows = steps(3, reward=0.0)
        for row, accuracy in ((rows[0], first), (rows[1], 0.8), (rows[2], last)):
            row |= {"val/accuracy": accuracy, "val/accuracy/low": accuracy - 0.1, "val/accuracy/high": accuracy + 0.1}
        runs.append(write_run(tmp_path / name, rows=rows))
    made = page(tmp_path, *runs)
    text = made.text("before-and-after")
    both = "step 1: 0.250 (0.150 to 0.350)", "step 2: 0.800 (0.700 to 0.900)"
    assert f"with_tool {both[0]} step 3: 0.750 (0.650 to 0.850) {both[1]}" in text
    assert f"without_tool {both[0]} step 3: 0.500 (0.400 to 0.600) {both[1]}" in text
    glance = made.text("at-a-glance")
    assert "0.250 → 0.750 validation at step 3, 95 %: 0.650 to 0.850" in glance and "0.250 → 0.500" in glance


def test_hours_are_told_over_the_whole_run_with_what_a_kill_lost(tmp_path: Path):
    rows = steps(4, seconds=10.0, **{"timing_s/step": 8.0, "timing_s/gen": 6.0, "timing_s/other": 2.0})
    for row in rows:
        row["timing_s/tool_wait"] = 1.0  # a part of gen
    for row in rows:
        row["timing_s/between_steps"] = 2.0
    rows[0] |= {"timing_s/start": 30.0, "timing_s/start/ray": 30.0}
    for row in rows[2:]:
        row["unix_s"] += 100.0  # killed after step 2, started again
    rows[2] |= {"timing_s/start": 40.0}
    run = write_run(tmp_path / "run", rows=rows)
    text = page(tmp_path, run, write_run(tmp_path / "other", kind="sft")).text("where-the-time-went")
    whole = 30 + 10 + 3 * 10 + 100  # the first start and step, three steps on, the gap
    assert f"starts 1 min 10 s, {70 / whole:.0%} generation 20 s, {20 / whole:.0%}" in text
    assert "tool wait 4 s" in text
    assert f"{LOST} 1 min 0 s, {60 / whole:.0%}" in text and "2 min 50 s in total" in text
    assert sum(time_spent(read_run(run)).values()) == pytest.approx(whole)


def test_a_real_runs_changes_are_those_that_its_file_makes():
    found = {setting.key: setting for setting in changed_settings([read_run(QUICKSTART / "tool_rl")])}
    assert found["run.root"].values == ('"runs/quickstart"',) and found["run.root"].default == '"runs"'
    assert found["model.path"].default == "required" and not found["model.path"].has_default
    defaults = {entry.key: entry.default for entry in reference(("rl",)) if entry.kind}
    assert all(setting.values[0] != defaults[key] for key, setting in found.items())
    assert "optim.betas" not in found and "parallel.tp" not in found and "verl_overrides" not in found


def test_a_default_that_is_another_keys_value_is_compared_with_that(tmp_path: Path):
    same = {"rollout": {"temperature": 0.6}, "validation": {"temperature": 0.6}}
    assert "validation.temperature" not in _changed(tmp_path / "same", **same)
    other = {"rollout": {"temperature": 0.6}, "validation": {"temperature": 1.0}}
    assert _changed(tmp_path / "other", **other)["validation.temperature"] == "1.0"


def test_of_two_runs_a_key_stands_there_if_one_changes_it(tmp_path: Path):
    one = read_run(write_run(tmp_path / "one", optim={"lr": 1e-3, "betas": [0.9, 0.999]}))
    two = read_run(write_run(tmp_path / "two", kind="sft", optim={"lr": 1e-3, "betas": [0.8, 0.999]}))
    found = {setting.key: setting for setting in changed_settings([one, two])}
    assert found["optim.betas"].values == ("[0.9, 0.999]", "[0.8, 0.999]") and found["optim.betas"].differs_between_runs
    assert not found["optim.lr"].differs_between_runs


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


def test_ticks_are_round_and_hold_all_values():
    svg = line_chart([Line(label="a", points=[(1, 0.34), (24, 0.94)])], title="t")
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts == ["0", "0.25", "0.5", "0.75", "1", "1", "10", "20", "24"]


def test_a_long_run_has_a_small_chart_that_keeps_its_peaks():
    points = [(step, 1.0) for step in range(50_000)]
    points[31_234] = (31_234, 9.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS and (31_234, 9.0) in kept and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
