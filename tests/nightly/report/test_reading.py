"""What a reader does with the page in chromium: filter, search, compare, note, take along."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.report.view.page import write_page
from retool_mcore.report.view.sources import open_source
from tests.nightly.report import test_browser
from tests.nightly.report.test_browser import RECORD, count, place, press, show, wait
from tests.unit.report.generated import write_run

browser, pytestmark = test_browser.browser, test_browser.pytestmark


def failing(shown: str, status: str = "finished") -> list[dict[str, Any]]:
    """The record's turns with a call that fails so."""
    first, *rest = RECORD["turns"]
    result = {**first["results"][0], "ok": False, "status": status, "shown": shown}
    return [{**first, "results": [result]}, *rest]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One problem at steps 1 and 3, another at step 2."""
    folder = tmp_path_factory.mktemp("reading")
    (folder / "trajectories").mkdir()
    other = RECORD["prompt"].replace("115", "116")
    wide = [value - 0.5 for value in RECORD["logprobs"]]
    rows = [
        {"key": "1-0_0_0", "step": 1, "acc": 0.0, "turns": failing("Traceback ...\nValueError: no"), "extracted": "17"},
        {"key": "1-0_1_0", "step": 1, "acc": 1.0},
        {"key": "2-1_0_0", "step": 2, "acc": 0.0, "prompt": other, "turns": failing("", "timeout")},
        {"key": "2-1_1_0", "step": 2, "acc": 0.0, "prompt": other, "actor_logprobs": wide},
        {"key": "3-0_0_0", "step": 3, "acc": 1.0},
    ]
    with (folder / "trajectories/trajectories.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({**RECORD, **row, "reward_info": {"acc": row["acc"]}, "reward": row["acc"]}) + "\n")
    metrics = [{"step": step, "reward": 0.5, "rollout/dropped": 0.0} for step in (1, 2, 3)]
    write_run(folder, rows=metrics)
    write_page([open_source(folder)], folder / "view.html", limit=100)
    return folder / "view.html"


def ids(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('table.rows td.id a:first-child')].map((a) => a.textContent)"
    return browser.execute_script(script)


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def filtered(browser: Any, page: Path, words: str) -> list[str]:
    show(browser, page, "all=1")
    browser.execute_script(
        "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
        words,
    )
    time.sleep(0.5)
    return ids(browser)


def test_all_steps_are_filtered_by_outcome_calls_error_length_mismatch_and_text(browser: Any, page: Path):
    assert filtered(browser, page, "") == ["1-0_0_0", "1-0_1_0", "2-1_0_0", "2-1_1_0", "3-0_0_0"]
    assert filtered(browser, page, "right:yes") == ["1-0_1_0", "3-0_0_0"]
    assert filtered(browser, page, "calls>1") == []
    assert filtered(browser, page, "errors:ValueError") == ["1-0_0_0"]
    assert filtered(browser, page, "errors:timeout step:2") == ["2-1_0_0"]
    assert filtered(browser, page, "tokens<10") == []
    assert filtered(browser, page, "gap>0.4") == ["2-1_1_0"]
    assert filtered(browser, page, "116 right:no") == ["2-1_0_0", "2-1_1_0"]


def test_a_bar_of_a_histogram_filters_and_takes_its_filter_back(browser: Any, page: Path):
    show(browser, page, "all=1")
    titles = "return [...document.querySelectorAll('.histogram')].map((f) => f.dataset.field)"
    assert browser.execute_script(titles) == ["outcome", "reward", "errors", "gap"], "calls and tokens are all alike"
    click(browser, ".histogram[data-field=outcome] .bin:nth-child(2)")
    wait(browser, lambda: ids(browser) == ["1-0_0_0", "2-1_0_0", "2-1_1_0"])
    assert browser.execute_script("return document.getElementById('search').value") == "right:no"
    click(browser, ".histogram[data-field=errors] .bin:nth-child(1)")
    wait(browser, lambda: len(ids(browser)) == 1)
    click(browser, ".histogram[data-field=errors] .bin[aria-pressed=true]")
    wait(browser, lambda: len(ids(browser)) == 3)


def test_a_problem_is_followed_over_the_steps(browser: Any, page: Path):
    show(browser, page, "step=1&id=1-0_0_0")
    click(browser, "#across")
    wait(browser, lambda: count(browser, "table.across"))
    cells = "return [...document.querySelectorAll('table.across tbody tr')].map((tr) => tr.innerText)"
    assert [line.split()[:2] for line in browser.execute_script(cells)] == [["1", "✗✓"], ["3", "✓"]]
    press(browser, "u")
    wait(browser, lambda: place(browser) == "#step=1&id=1-0_0_0")


def test_two_trajectories_are_compared_side_by_side(browser: Any, page: Path):
    show(browser, page, "step=1&id=1-0_0_0")
    click(browser, "#opposite")
    wait(browser, lambda: count(browser, "ins"))
    marked = (
        "return [...document.querySelectorAll('.turns del, .turns ins')].map((e) => `${e.tagName} ${e.textContent}`)"
    )
    assert browser.execute_script(marked) == ["DEL Traceback ...\nValueError: no", "INS 381966"]
    strong = "return [...document.querySelectorAll('.facts2 tr.strong td:first-child')].map((e) => e.textContent)"
    assert set(browser.execute_script(strong)) >= {"right", "extracted", "failed", "errors"}
    show(browser, page, "step=1")
    press(browser, "m")
    press(browser, "j")
    press(browser, "c")
    wait(browser, lambda: "with=" in place(browser))


def test_a_note_is_kept_marked_found_and_exported(browser: Any, page: Path):
    show(browser, page, "step=3&id=3-0_0_0")
    press(browser, "n")
    press(browser, "look here")
    saved = (
        "const was = URL.createObjectURL; URL.createObjectURL = (blob) => { window.saved = blob; return was(blob); };"
    )
    show(browser, page, "all=1")
    assert browser.execute_script("return document.querySelector('tbody').innerText").count("✎") == 1
    assert filtered(browser, page, "noted:yes") == ["3-0_0_0"]
    browser.execute_script(saved)
    for button, keys in (
        ("#export-notes", {"note": "look here"}),
        ("#export", {"note": "look here", "truth": "381966"}),
    ):
        click(browser, button)
        wait(browser, lambda: browser.execute_script("return Boolean(window.saved)"))
        text = browser.execute_async_script("window.saved.text().then(arguments[0]); window.saved = null")
        [row] = [json.loads(line) for line in text.splitlines()]
        assert (row["id"], row["step"]) == ("3-0_0_0", 3) and row.items() >= keys.items()
    assert row["turns"][0]["results"][0]["code"] == "print(sum(range(115, 881 + 1)))"
    browser.execute_script("localStorage.clear()")


@pytest.mark.parametrize("at", ["", "all=1", "step=1", "step=1&id=1-0_0_0", "step=1&id=1-0_0_0&view=across"])
def test_a_page_of_400_pixels_does_not_scroll_sideways(browser: Any, page: Path, at: str):
    emulated = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", emulated)
    try:
        show(browser, page, at)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        search = "return [...['crumbs', 'search']].map((id) => document.getElementById(id).getBoundingClientRect().top)"
        crumbs, below = browser.execute_script(search)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= 400
    assert crumbs < below, "the way lies under the filter"
