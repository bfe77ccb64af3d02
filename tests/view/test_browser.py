"""The page in chromium: every view, the keyboard, deep links, the filter and hostile text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.view.page import write_page
from retool_mcore.view.sources import open_source

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver on this machine")
RUN = Path(__file__).parent / "run"
RECORD = json.loads((RUN / "trajectories/trajectories.jsonl").read_text().splitlines()[0])
HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>\u202egnp.exe\u2066" + "y" * 100_000


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1000,900")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "view.html"
    write_page([open_source(RUN)], out, limit=1000)
    return out


def wait(browser: Any, told: Callable[[], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10).until(lambda _: told())


def show(browser: Any, page: Path, place: str) -> str:
    """Open the page at ``place``; what it shows."""
    browser.get("about:blank")
    browser.get(f"file://{page}#{place}")
    drawn = "return document.body?.dataset.ready && document.querySelector('main').childNodes.length"
    wait(browser, lambda: browser.execute_script(drawn))
    return browser.execute_script("return document.querySelector('main').innerText")


def press(browser: Any, key: str) -> None:
    webdriver.ActionChains(browser).send_keys(key).perform()


def count(browser: Any, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def place(browser: Any) -> str:
    return browser.execute_script("return location.hash")


def test_curves_are_drawn_with_the_value_under_the_pointer(browser: Any, page: Path):
    show(browser, page, "")
    chart = "[data-metric=accuracy]"
    wait(browser, lambda: count(browser, f"{chart} canvas"))
    over = browser.find_element("css selector", f"{chart} .u-over")
    webdriver.ActionChains(browser).move_to_element(over).perform()
    said = wait(browser, lambda: browser.find_element("css selector", f"{chart} output").text)
    assert said.startswith("step 1")


def test_the_table_is_filtered_and_sorted(browser: Any, page: Path):
    show(browser, page, "step=24")
    before = count(browser, "table.rows tbody tr")
    search = browser.find_element("css selector", "#search")
    search.send_keys("right:no")
    wrong = sum(row.step == 24 and not row.right for row in open_source(RUN).rows)
    assert 0 < wrong < before
    wait(browser, lambda: count(browser, "table.rows tbody tr") == wrong)
    search.clear()
    search.send_keys("code_interpreter zebra")
    wait(browser, lambda: count(browser, ".empty"))
    search.clear()
    search.send_keys("code_interpreter print")  # of the texts, which lie in the chunks
    wait(browser, lambda: count(browser, "table.rows tbody tr") == before)
    browser.find_element("xpath", "//th/button[.='reward']").click()
    wait(browser, lambda: count(browser, "th[aria-sort=descending]"))
    rewards = [cell.text for cell in browser.find_elements("css selector", "table.rows tbody td:nth-child(6)")]
    assert [float(each) for each in rewards] == sorted(map(float, rewards), reverse=True)


def test_the_keyboard_goes_everywhere(browser: Any, page: Path):
    show(browser, page, "step=1")
    press(browser, "j")
    press(browser, "j")
    press(browser, "k")
    assert browser.execute_script("return document.querySelector('tr.chosen').dataset.number") == "1"
    press(browser, "\ue007")  # Enter
    wait(browser, lambda: "id=" in place(browser) and count(browser, ".card.said"))
    first = place(browser)
    press(browser, "j")
    wait(browser, lambda: place(browser) != first)
    press(browser, "u")
    wait(browser, lambda: place(browser) == "#step=1")
    wait(browser, lambda: count(browser, "table.rows"))
    press(browser, "\ue014")  # right arrow
    wait(browser, lambda: place(browser) not in ("", "#step=1"))
    press(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "search"


def test_a_deep_link_opens_a_trajectory_and_its_tokens(browser: Any, page: Path):
    key = RECORD["key"]
    text = show(browser, page, f"step=1&id={key}")
    assert RECORD["turns"][-1]["text"] in text
    assert count(browser, ".code .nb"), "code is highlighted"
    text = show(browser, page, f"step=1&id={key}&view=tokens&by=logprob")
    assert count(browser, ".token") == len(RECORD["response_ids"])
    assert count(browser, ".token.off") == RECORD["loss_mask"].count(0)
    token = browser.find_elements("css selector", ".token")[0]
    webdriver.ActionChains(browser).move_to_element(token).perform()
    wait(browser, lambda: "logp -0.001" in browser.find_element("css selector", ".hover").text)


def test_a_group_is_side_by_side_with_its_tally(browser: Any, page: Path):
    group = RECORD["key"].rsplit("_", 2)[0]
    text = show(browser, page, f"step=1&group={group}")
    assert count(browser, ".side .card") == sum(row.group == group for row in open_source(RUN).rows)
    assert "Answers" in text
    assert "[object" not in text


def test_hostile_text_is_shown_and_does_nothing(browser: Any, tmp_path: Path):
    turns = [{**RECORD["turns"][0], "text": HOSTILE}]
    turns[0]["results"] = [{**turns[0]["results"][0], "code": HOSTILE, "shown": HOSTILE}]
    row = {**RECORD, "turns": turns, "prompt": HOSTILE, "answer": HOSTILE, "truth": HOSTILE}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    write_page([open_source(tmp_path / "rows.jsonl")], tmp_path / "view.html", limit=10)
    group = row["key"].rsplit("_", 2)[0]
    for where in ("step=1", f"step=1&id={row['key']}", f"step=1&group={group}"):
        text = show(browser, tmp_path / "view.html", where)
        assert "</script><script>" in text
        assert "U+202E" in text
        assert "\u202e" not in text
        assert browser.execute_script("return window.hit === undefined && !document.querySelector('img')")


def test_a_file_without_log_probabilities_says_so(browser: Any, tmp_path: Path):
    row = {key: value for key, value in RECORD.items() if key not in ("logprobs", "actor_logprobs")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    write_page([open_source(tmp_path / "rows.jsonl")], tmp_path / "view.html", limit=10)
    text = show(browser, tmp_path / "view.html", f"step=1&id={row['key']}&view=tokens")
    assert "no log-probability" in text
    assert "shown as their ids" in text
    assert count(browser, "[data-by=gap][disabled]") == 1


def test_nothing_is_wider_than_the_page(browser: Any, page: Path):
    for where in ("", "step=1", f"step=1&id={RECORD['key']}", f"step=1&group={RECORD['key'].rsplit('_', 2)[0]}"):
        show(browser, page, where)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), where
