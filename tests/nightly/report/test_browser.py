"""The page in chromium: every view, deep links, hostile text; filter, compare, note, take along."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.report.view.page import write_page
from retool_mcore.report.view.serve import LivePage, serve
from retool_mcore.report.view.sources import open_source
from tests.unit.report.generated import write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver on this machine")
RUN = Path(__file__).parents[2] / "report/view/run"
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


def written(folder: Path, *sources: Path) -> Path:
    write_page([open_source(source) for source in sources], folder / "view.html", limit=1000)
    return folder / "view.html"


def sampled(record: dict[str, Any], **more: Any) -> str:
    """The record as `retool eval` and `retool rollout` write one: named by prompt and sample."""
    training = ("key", "step", "partition", "prompt", "actor_logprobs", "advantage", "reward", "reward_info")
    return json.dumps({key: value for key, value in record.items() if key not in training} | more) + "\n"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, a rollout with a repair and cut output, a run of SFT."""
    folder = tmp_path_factory.mktemp("many")
    shutil.copytree(RUN, folder / "second")
    tokens = len(RECORD["response_ids"])
    row = {**RECORD, "advantage": [0.25] * tokens, "versions": [7] * tokens}
    row |= {"logprobs": [-0.5] * tokens, "actor_logprobs": [-0.375] * tokens}
    (folder / "second/trajectories/trajectories.jsonl").write_text(json.dumps(row) + "\n")
    call = {**RECORD["turns"][0], "repairs": ["closed the call"]}
    cut = "first\n[... about 120 tokens cut here ...]\nlast"
    call["results"] = [{**call["results"][0], "shown": cut, "cut_tokens": 120}]
    (folder / "made.jsonl").write_text(sampled({**RECORD, "turns": [call, *RECORD["turns"][1:]]}, prompt=3, sample=0))
    write_run(folder / "sft", kind="sft", rows=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}])
    return written(folder, RUN, *(folder / name for name in ("second", "made.jsonl", "sft")))


def wait(browser: Any, condition: Callable[[], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10).until(lambda _: condition())


def show(browser: Any, page: Path, place: str) -> str:
    """Open the page at ``place``; what it shows."""
    browser.get("about:blank")
    browser.get(f"file://{page}#{place}")
    drawn = "return document.body?.dataset.ready && document.querySelector('main').childNodes.length"
    wait(browser, lambda: browser.execute_script(drawn))
    return browser.execute_script("return document.querySelector('main').innerText")


def press(browser: Any, key: str) -> None:
    webdriver.ActionChains(browser).send_keys(key).perform()


def hover(browser: Any, selector: str) -> None:
    webdriver.ActionChains(browser).move_to_element(browser.find_element("css selector", selector)).perform()


def text_of(browser: Any, selector: str) -> str:
    return browser.find_element("css selector", selector).text


def count(browser: Any, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def test_a_page_that_loads_itself_anew_keeps_what_the_reader_has_set(browser: Any, tmp_path: Path):
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    out, lines = tmp_path / "view.html", list[str]()
    page = LivePage([run], out, lambda version: write_page([open_source(run)], out, limit=100, live=version))
    threading.Thread(target=serve, args=(page, 0, lines.append), daemon=True).start()
    wait(browser, lambda: lines)
    browser.get(f"{re.findall(r'http://[^ ]+', lines[0])[0]}#all=1")
    wait(browser, lambda: browser.execute_script("return document.body.dataset.ready"))
    browser.find_element("css selector", "#search").send_keys("right:yes\ue007")
    wait(browser, lambda: count(browser, "#count") and "of" in text_of(browser, "#count"))
    browser.find_element("xpath", "//th/button[.='tokens']").click()
    shown = text_of(browser, "#count")
    browser.execute_script("window.before = true")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "reward": 0.5}\n')
    wait(browser, lambda: browser.execute_script("return !window.before && document.body.dataset.ready"))
    assert text_of(browser, "#count") == shown
    assert browser.find_element("css selector", "#search").get_attribute("value") == "right:yes"
    assert count(browser, "th[aria-sort=descending]") == 1


def test_a_deep_link_opens_a_trajectory_its_tokens_and_its_group(browser: Any, tmp_path: Path):
    key, page = RECORD["key"], written(tmp_path, RUN)
    assert RECORD["turns"][-1]["text"] in show(browser, page, f"step=1&id={key}")
    assert count(browser, ".code .nb"), "code is highlighted"
    show(browser, page, f"step=1&id={key}&view=tokens&by=logprob")
    assert count(browser, ".token") == len(RECORD["response_ids"])
    assert count(browser, ".token.off") == RECORD["loss_mask"].count(0)
    hover(browser, ".token")
    wait(browser, lambda: "logp -0.001" in text_of(browser, ".hover"))
    group = key.rsplit("_", 2)[0]
    text = show(browser, page, f"step=1&group={group}")
    assert count(browser, ".side .card") == sum(row.group == group for row in open_source(RUN).rows)
    assert "Answers" in text and "[object" not in text


def test_hostile_text_is_shown_and_does_nothing(browser: Any, tmp_path: Path):
    turns = [{**RECORD["turns"][0], "text": HOSTILE}]
    turns[0]["results"] = [{**turns[0]["results"][0], "code": HOSTILE, "shown": HOSTILE}]
    row = {**RECORD, "turns": turns, "prompt": HOSTILE, "extracted": HOSTILE, "truth": HOSTILE}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    page = written(tmp_path, tmp_path / "rows.jsonl")
    group = row["key"].rsplit("_", 2)[0]
    for where in ("step=1", f"step=1&id={row['key']}", f"step=1&group={group}"):
        text = show(browser, page, where)
        assert "</script><script>" in text and "U+202E" in text and "\u202e" not in text
        assert browser.execute_script("return window.hit === undefined && !document.querySelector('img')")


def test_runs_are_side_by_side_in_one_chart_with_the_values_under_the_pointer(browser: Any, many: Path):
    text = show(browser, many, "")
    assert count(browser, "table.sources tbody tr") == 4
    assert "sft: curves only: supervised fine-tuning samples no trajectories" in text
    assert count(browser, ".legend .dot") == 3, "those with curves"
    wait(browser, lambda: count(browser, "[data-metric=accuracy] canvas"))
    hover(browser, "[data-metric=accuracy] .u-over")
    text = wait(browser, lambda: text_of(browser, "[data-metric=accuracy] output"))
    assert text.startswith("step 1") and text.count("·") == 1, "one value of each of the two runs"
    wait(browser, lambda: count(browser, "[data-metric=loss] canvas"))


@pytest.mark.parametrize(
    ("by", "shown"),
    [
        ("logprob", "logp -0.500 (p"),
        ("gap", "actor − engine 0.125"),
        ("advantage", "advantage 0.250"),
        ("version", "weights 7"),
    ],
)
def test_a_colouring_has_its_value_under_the_pointer(browser: Any, many: Path, by: str, shown: str):
    show(browser, many, f"run=1&step=1&id={RECORD['key']}&view=tokens&by={by}")
    assert count(browser, f"[data-by={by}][aria-pressed=true]") == 1
    assert count(browser, ".token.on[style*=background]") == RECORD["loss_mask"].count(1)
    hover(browser, ".token.on")
    wait(browser, lambda: shown in text_of(browser, ".hover"))


def test_a_sample_without_tokens_is_shown_with_what_is_absent(browser: Any, tmp_path: Path):
    columns = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
    row = json.loads(sampled(RECORD, problem=4, sample=0, correct=True))
    (tmp_path / "samples.jsonl").write_text(json.dumps({k: v for k, v in row.items() if k not in columns}) + "\n")
    page, where = written(tmp_path, tmp_path), "step=0&part=sample&id=4-0"
    text = show(browser, page, where)
    assert RECORD["turns"][-1]["text"] in text and " 0 tokens" not in text
    assert "does not contain the text of the prompt, because the model was sampled through an API" in text
    assert "no tokens and no log-probabilities" in show(browser, page, f"{where}&view=tokens")
    assert count(browser, ".token") == 0


def test_cut_output_and_a_repair_are_marked(browser: Any, many: Path):
    text = show(browser, many, "run=2&step=0&part=sample&id=3-0")
    assert "120 tokens were cut here" in text and "repaired: closed the call" in text
    assert [node.text for node in browser.find_elements("css selector", ".card.tool .out")] == ["first", "last"]
    _, after = browser.find_elements("css selector", ".repair .two > div")
    assert RECORD["turns"][0]["results"][0]["code"] in after.text


def failing(shown: str, status: str = "finished") -> list[dict[str, Any]]:
    """The record's turns with a call that fails so."""
    first, *rest = RECORD["turns"]
    result = {**first["results"][0], "ok": False, "status": status, "shown": shown}
    return [{**first, "results": [result]}, *rest]


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return written(folder, folder)


def ids(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('table.rows td.id a:first-child')].map((a) => a.textContent)"
    return browser.execute_script(script)


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def filtered(browser: Any, reading: Path, words: str) -> list[str]:
    show(browser, reading, "all=1")
    browser.execute_script(
        "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
        words,
    )
    time.sleep(0.5)
    return ids(browser)


def test_all_steps_are_filtered_by_outcome_calls_error_length_mismatch_and_text(browser: Any, reading: Path):
    assert filtered(browser, reading, "") == ["1-0_0_0", "1-0_1_0", "2-1_0_0", "2-1_1_0", "3-0_0_0"]
    assert filtered(browser, reading, "right:yes") == ["1-0_1_0", "3-0_0_0"]
    assert filtered(browser, reading, "errors:ValueError") == ["1-0_0_0"]
    assert filtered(browser, reading, "errors:timeout step:2") == ["2-1_0_0"]
    assert filtered(browser, reading, "gap>0.4") == ["2-1_1_0"]
    assert filtered(browser, reading, "116 right:no") == ["2-1_0_0", "2-1_1_0"]


def test_two_trajectories_are_compared_side_by_side(browser: Any, reading: Path):
    show(browser, reading, "step=1&id=1-0_0_0")
    click(browser, "#opposite")
    wait(browser, lambda: count(browser, "ins"))
    marked = (
        "return [...document.querySelectorAll('.turns del, .turns ins')].map((e) => `${e.tagName} ${e.textContent}`)"
    )
    assert browser.execute_script(marked) == ["DEL Traceback ...\nValueError: no", "INS 381966"]
    strong = "return [...document.querySelectorAll('.facts2 tr.strong td:first-child')].map((e) => e.textContent)"
    assert set(browser.execute_script(strong)) >= {"right", "extracted", "failed", "errors"}


def test_a_note_is_kept_marked_found_and_exported(browser: Any, reading: Path):
    show(browser, reading, "step=3&id=3-0_0_0")
    press(browser, "n")
    press(browser, "look here")
    saved = (
        "const was = URL.createObjectURL; URL.createObjectURL = (blob) => { window.saved = blob; return was(blob); };"
    )
    show(browser, reading, "all=1")
    assert browser.execute_script("return document.querySelector('tbody').innerText").count("✎") == 1
    assert filtered(browser, reading, "noted:yes") == ["3-0_0_0"]
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
