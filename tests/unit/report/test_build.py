"""A report tells what the files hold, names what they lack, and lets no name become markup."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.report.build import write_report
from tests.unit.report.generated import NOW_S, QUICKSTART, steps, write_evaluation, write_run

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
        *("the-models", "before-and-after", "run-against-run", "trajectories-before-and-after"),
        *("behaviour", "dropped-cut-and-malformed", "throughput"),
        *("where-the-time-went", "start", "settings", "versions-and-hardware"),
    ]
    assert "0.322 → 0.918" in made.text("at-a-glance") and "24 of 24" in made.text("at-a-glance")
    assert "+0.596 (+0.551 to +0.641)" in made.text("before-and-after")
    assert "-0.918 (-0.941 to -0.895)" in made.text("run-against-run")
    assert "Loss, SFT" in made.text("learning") and "Accuracy, RL" in made.text("learning")
    for title in ("Code ratio", "Lines of code", "Code pass rate", "Position of the first call"):
        assert title in made.text("behaviour")
    for title in ("Response length", "Self-corrections"):
        assert title in made.text("behaviour")
    assert "update actor" in made.text("where-the-time-went") and "59 s to the first step" in made.text("start")
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
    assert "bare: no phases are recorded" in made.text("where-the-time-went")
    assert "the stages of its start are not recorded" in made.text("start")
    assert "Not recorded." in made.text("dropped-cut-and-malformed")
    assert "the run recorded no versions and hardware" in made.text("versions-and-hardware")


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_without_any_step_has_a_report(tmp_path: Path, kind: str):
    made = page(tmp_path, write_run(tmp_path / "empty", kind=kind))
    assert "0 of 10" in made.text("at-a-glance") and "svg" not in made.tags


def test_an_sft_run_alone_says_what_it_does_not_have(tmp_path: Path):
    made = page(tmp_path, QUICKSTART / "sft")
    assert "An SFT run samples nothing." in made.text("behaviour")
    assert "Loss" in made.text("learning") and "Accuracy" not in made.text("learning")
    assert "not evaluated" in made.text("before-and-after")
    assert "run-against-run" not in made.sections


def test_mfu_and_the_machine_are_told_where_they_were_recorded(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(5, mfu=0.41, tokens_per_s=1000.0, **{"timing_s/step": 3.0}))
    (run / "environment.json").write_text('{"versions": {"torch": "2.13.0"}, "hardware": {"driver": "8 x H200"}}')
    made = page(tmp_path, run)
    assert "MFU 41.0%" in made.text("at-a-glance") and "No MFU" not in made.text("throughput")
    assert "8 x H200" in made.text("versions-and-hardware") and "2.13.0" in made.text("versions-and-hardware")


def test_phases_are_means_that_add_up_to_the_step(tmp_path: Path):
    rows = steps(5, **{"timing_s/step": 4.0, "timing_s/gen": 3.0, "timing_s/other": 1.0})
    rows[0] |= {"timing_s/gen": 300.0, "timing_s/step": 301.0}  # the first step warms up
    made = page(tmp_path, write_run(tmp_path / "run", rows=rows))
    text = made.text("where-the-time-went")
    assert "3 s, 75%" in text and "1 s, 25%" in text and "mean of a step: 4 s" in text


def test_warnings_malformed_calls_and_the_parts_of_an_own_reward_are_in_the_report(tmp_path: Path):
    metrics = {"actor/grad_norm": 0.0, "behavior/malformed/json": 0.5, "behavior/calls": 0.5, "reward/tests": 0.25}
    made = page(tmp_path, write_run(tmp_path / "run", rows=steps(4, **metrics)))
    assert "grad_norm of step 4 is 0" in made.text("warnings")
    assert "50% of the calls of the last 4 steps could not be read" in made.text("warnings")
    assert "malformed calls a trajectory: json 0.5" in made.text("dropped-cut-and-malformed")
    assert "reward part: tests 0.25" in made.text("dropped-cut-and-malformed")
    text = (tmp_path / "report.html").read_text()
    assert text.index("</details>") > text.index('id="warnings"') > text.index('id="learning"')
    assert text.count("MFU") == 1


def test_dropped_trajectories_add_up_over_steps(tmp_path: Path):
    rows = steps(4, **{"rollout/dropped": 2.0, "groups/all_right": 0.25})
    text = page(tmp_path, write_run(tmp_path / "run", rows=rows)).text("dropped-cut-and-malformed")
    assert "trajectories dropped by outages 8" in text and "all right (mean share) 0.25" in text


@pytest.mark.parametrize("form", [".html", ".md"])
def test_hostile_names_stay_text(tmp_path: Path, form: str):
    run = write_run(tmp_path / "run", rows=steps(4, accuracy=0.5), model={"path": HOSTILE}, run={"name": HOSTILE})
    (run / "start.jsonl").write_text(
        "".join(f'{{"stage": "<b>{n}", "unix_s": {NOW_S}, "clock_s": {n}}}\n' for n in range(3))
    )
    write_evaluation(tmp_path / "eval", HOSTILE, [1, 2], data="<img src=x onerror=alert(1)>")
    out = tmp_path / f"report{form}"
    write_report([run], out)
    text = out.read_text(encoding="utf-8")
    assert "<script" not in text and "<img" not in text and "<b>0" not in text
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
    with pytest.raises(ConfigError, match=r"report.pdf: a report is written as \.html or \.md"):
        write_report(RUNS, tmp_path / "report.pdf")


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path):
    one, two = (write_run(tmp_path / where / "run", rows=steps(3, reward=0.1)) for where in "ab")
    made = page(tmp_path, one, two)
    assert str(one) in made.text("at-a-glance") and str(two) in made.text("at-a-glance")
    assert "No two runs of a kind have evaluations of the same problems" in made.text("run-against-run")
