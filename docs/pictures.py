"""Takes the screenshots of `retool report` and `retool view` from a quickstart's folder.

    python docs/pictures.py runs/quickstart        after `make quickstart`
    python docs/pictures.py                        from the quickstart that is recorded for tests

Needs chromium with chromedriver, and selenium (the extra ``dev``).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selenium import webdriver

from retool_mcore.report.build import write_report
from retool_mcore.report.view.page import write_page
from retool_mcore.report.view.sources import open_source

ROOT = Path(__file__).parents[1]
TO = Path(__file__).parent / "pictures"
RECORDED, RECORDED_VIEW = ROOT / "tests/report/quickstart", ROOT / "tests/report/view/run"
RUNS = ("sft", "tool_rl", "text_rl")
WIDTH, MAX_BYTES = 1100, 200_000
SECTIONS = {"report_glance": "at-a-glance", "report_before_after": "before-and-after", "report_behaviour": "behaviour"}
SECTIONS |= {"report_time": "where-the-time-went"}


def main(arguments: Sequence[str]) -> None:
    root = Path(arguments[0]).absolute() if arguments else RECORDED
    browser = _chromium()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            runs = Path("runs/quickstart")  # so that pictures show a user's paths, not this machine's
            runs.parent.mkdir()
            shutil.copytree(root, runs, ignore=shutil.ignore_patterns("*.pt", "*.distcp", "*.safetensors", "logs"))
            if not arguments:
                shutil.copytree(RECORDED_VIEW, runs / "tool_rl", dirs_exist_ok=True)
            write_report([runs / name for name in RUNS], Path("report.html"))
            browser.get(f"file://{folder}/report.html")
            browser.set_window_size(WIDTH, 1500)
            for name, section in SECTIONS.items():
                _save(name, browser.find_element("id", section).screenshot_as_png)
            browser.set_window_size(WIDTH, 760)
            source = open_source(runs / "tool_rl")
            write_page([source], Path("view.html"), limit=1000)
            row = max(source.rows, key=lambda row: (row.partition == "train", row.step, row.id))
            for name, place in {"view_step": "", "view_trajectory": f"&id={row.id}"}.items():
                _save(name, _screenshot(browser, Path(folder) / "view.html", f"step={row.step}{place}"))
    finally:
        browser.quit()


def _chromium() -> Any:
    options: Any = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    size = f"--window-size={WIDTH},760"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def _screenshot(browser: Any, page: Path, place: str) -> bytes:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")
    browser.get(f"file://{page}#{place}")
    drawn = "return document.body?.dataset.ready && document.querySelector('main').childNodes.length"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(drawn))
    return browser.get_screenshot_as_png()


def _save(name: str, png: bytes) -> None:
    assert len(png) < MAX_BYTES, f"{name} has {len(png)} bytes, more than {MAX_BYTES}"
    (TO / f"{name}.png").write_bytes(png)


if __name__ == "__main__":
    main(sys.argv[1:])
