"""The page in chromium: every view, the keyboard, deep links, the filter and hostile text."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from retool_mcore.report.view.page import write_page
from retool_mcore.report.view.serve import LivePage, live_app
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "view.html"
    write_page([open_source(RUN)], out, limit=1000)
    return out


def sampled(record: dict[str, Any], **more: Any) -> str:
    """The record as `retool eval` and `retool rollout` write one: named by prompt and sample."""
    training = ("key", "step", "partition", "prompt", "actor_logprobs", "advantage", "reward", "reward_info")
    return json.dumps({key: value for key, value in record.items() if key not in training} | more) + "\n"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, an evaluation, a rollout with a repair and cut output, a run of SFT."""
    folder = tmp_path_factory.mktemp("many")
    shutil.copytree(RUN, folder / "second")
    tokens = len(RECORD["response_ids"])
    row = {**RECORD, "advantage": [0.25] * tokens, "versions": [7] * tokens}
    row |= {"logprobs": [-0.5] * tokens, "actor_logprobs": [-0.375] * tokens}
    (folder / "second/trajectories/trajectories.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "aime").mkdir()
    (folder / "aime/settings.json").write_text(json.dumps({"model": str(RUN / "export")}))
    (folder / "aime/samples.jsonl").write_text(
        sampled(RECORD, problem=0, sample=0, correct=True) + sampled(RECORD, problem=0, sample=1, correct=False)
    )
    call = {**RECORD["turns"][0], "repairs": ["closed the call"]}
    cut = "first\n[... about 120 tokens cut here ...]\nlast"
    call["results"] = [{**call["results"][0], "shown": cut, "cut_tokens": 120}]
    (folder / "made.jsonl").write_text(sampled({**RECORD, "turns": [call, *RECORD["turns"][1:]]}, prompt=3, sample=0))
    write_run(folder / "sft", kind="sft", rows=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}])
    paths = (RUN, *(folder / name for name in ("second", "aime", "made.jsonl", "sft")))
    write_page([open_source(path) for path in paths], folder / "view.html", limit=1000)
    return folder / "view.html"


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
    text = wait(browser, lambda: browser.find_element("css selector", f"{chart} output").text)
    assert text.startswith("step 1")


def test_the_keyboard_goes_everywhere(browser: Any, page: Path):
    show(browser, page, "step=1")
    press(browser, "j")
    press(browser, "j")
    press(browser, "k")
    assert browser.execute_script("return document.querySelector('tr.chosen').dataset.number") == "1"
    press(browser, "\ue007")  # Enter
    wait(browser, lambda: "id=" in place(browser) and count(browser, ".card.model"))
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


def test_a_page_that_loads_itself_anew_keeps_what_the_reader_has_set(browser: Any, tmp_path: Path):
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    out = tmp_path / "view.html"
    page = LivePage([run], out, lambda version: write_page([open_source(run)], out, limit=100, live=version))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(live_app(page, "s", [host]), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        browser.get(f"http://{host}/s/#all=1")
        wait(browser, lambda: browser.execute_script("return document.body.dataset.ready"))
        browser.find_element("css selector", "#search").send_keys("right:yes\ue007")
        wait(browser, lambda: count(browser, "#count") and "of" in browser.find_element("css selector", "#count").text)
        browser.find_element("xpath", "//th/button[.='tokens']").click()
        shown = browser.find_element("css selector", "#count").text
        browser.execute_script("window.before = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 25, "reward": 0.5}\n')
        wait(browser, lambda: browser.execute_script("return !window.before && document.body.dataset.ready"))
        assert browser.find_element("css selector", "#count").text == shown
        assert browser.find_element("css selector", "#search").get_attribute("value") == "right:yes"
        assert count(browser, "th[aria-sort=descending]") == 1
        server.should_exit = True
        thread.join(timeout=10)


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
    row = {**RECORD, "turns": turns, "prompt": HOSTILE, "extracted": HOSTILE, "truth": HOSTILE}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    write_page([open_source(tmp_path / "rows.jsonl")], tmp_path / "view.html", limit=10)
    group = row["key"].rsplit("_", 2)[0]
    for where in ("step=1", f"step=1&id={row['key']}", f"step=1&group={group}"):
        text = show(browser, tmp_path / "view.html", where)
        assert "</script><script>" in text
        assert "U+202E" in text
        assert "\u202e" not in text
        assert browser.execute_script("return window.hit === undefined && !document.querySelector('img')")


def hover(browser: Any, selector: str) -> None:
    webdriver.ActionChains(browser).move_to_element(browser.find_element("css selector", selector)).perform()


def test_runs_are_side_by_side_in_one_chart(browser: Any, many: Path):
    text = show(browser, many, "")
    assert count(browser, "table.sources tbody tr") == 5
    assert "sft: curves only: supervised fine-tuning samples no trajectories" in text
    assert browser.execute_script("return [...document.querySelectorAll('.legend .dot')].length") == 3, "with curves"
    wait(browser, lambda: count(browser, "[data-metric=accuracy] canvas"))
    hover(browser, "[data-metric=accuracy] .u-over")
    text = wait(browser, lambda: browser.find_element("css selector", "[data-metric=accuracy] output").text)
    assert text.count("·") == 1, "one value of each of the two runs"
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
    wait(browser, lambda: shown in browser.find_element("css selector", ".hover").text)


def test_a_sample_without_tokens_is_shown_with_what_is_absent(browser: Any, tmp_path: Path):
    columns = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
    row = json.loads(sampled(RECORD, problem=4, sample=0, correct=True))
    (tmp_path / "samples.jsonl").write_text(json.dumps({k: v for k, v in row.items() if k not in columns}) + "\n")
    write_page([open_source(tmp_path)], tmp_path / "view.html", limit=10)
    where = "step=0&part=sample&id=4-0"
    text = show(browser, tmp_path / "view.html", where)
    assert RECORD["turns"][-1]["text"] in text and " 0 tokens" not in text
    assert "does not contain the text of the prompt, because the model was sampled through an API" in text
    assert "no tokens and no log-probabilities" in show(browser, tmp_path / "view.html", f"{where}&view=tokens")
    assert count(browser, ".token") == 0


def test_cut_output_and_a_repair_are_marked(browser: Any, many: Path):
    text = show(browser, many, "run=3&step=0&part=sample&id=3-0")
    assert "120 tokens were cut here" in text
    assert [node.text for node in browser.find_elements("css selector", ".card.tool .out")] == ["first", "last"]
    assert "repaired: closed the call" in text
    before, after = browser.find_elements("css selector", ".repair .two > div")
    assert "<tool_call>" in before.text or "<code>" in before.text or "```" in before.text
    assert RECORD["turns"][0]["results"][0]["code"] in after.text
