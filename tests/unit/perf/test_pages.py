"""The history parses and prints; the pages name files that exist."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from retool_mcore.errors import DataError

ROOT = Path(__file__).parents[3]
PERF = ROOT / "perf"
CASES = PERF / "cases.toml"


@pytest.fixture(scope="module")
def history() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perf_history", PERF / "history.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks a class's annotations up there
    spec.loader.exec_module(module)
    return module


def test_topic_days_and_words_all_choose(history: ModuleType):
    days = [history.Record.model_validate(record("2026-11-2" + day)) for day in "123"]
    days.append(days[1].model_copy(update={"topics": ["FP8"]}))

    def titles(topic: str, since: str, until: str, *words: str) -> list[str]:
        first, last = history.date.fromisoformat(since), history.date.fromisoformat(until)
        return [str(found.date)[-2:] for found in history.select(days, topic, first, last, list(words))]

    assert titles("", "2026-11-22", "2026-11-23") == ["22", "23", "22"]
    assert titles("sandbox", "2026-11-22", "2026-11-22") == ["22"]
    assert titles("", "2026-11-21", "2026-11-23", "NUMPY", "fp8") == ["22"]


def test_every_line_of_the_history_is_a_record_in_the_order_of_days(history: ModuleType):
    records = history.read()
    assert len(records) >= 58
    assert [record.date for record in records] == sorted(record.date for record in records)
    assert all(record.topics and record.hardware and record.title and record.text for record in records)


def test_a_damaged_line_is_named(history: ModuleType, tmp_path: Path):
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(record("2026-11-21")) + "\n" + json.dumps(record("yesterday")) + "\n")
    with pytest.raises(
        DataError, match=r"history\.jsonl, line 2 is not a valid record: date: .* A record has date, commit"
    ):
        history.read(path)


def record(day: str) -> dict[str, object]:
    return {
        "date": day,
        "commit": "0000000",
        "hardware": "H200",
        "topics": ["sandbox"],
        "kind": "measured",
        "command": "",
        "title": "Sandbox",
        "text": "numpy 7.7 ms",
    }


def test_the_changelog_has_dated_versions_and_names_settings_that_exist():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert all(re.match(r"\[(Unreleased|\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d)", version) for version in versions)
    assert versions[-1].startswith("[0.1.0] - ")
    keys = set(re.findall(r"^\| `([a-z_0-9.]+)`", (ROOT / "configs" / "README.md").read_text(encoding="utf-8"), re.M))
    sections = {key.partition(".")[0] for key in keys}
    named = set(re.findall(r"`([a-z_]+\.[a-z_0-9]+)`", text)) | set(re.findall(r"`\[([a-z_]+)\]`", text))
    assert len(named) > 30 and named - keys - sections == set()


@pytest.mark.parametrize("page", ["perf/RESULTS.md", "perf/LOG.md", *sorted(map(str, (ROOT / "docs").glob("*.md")))])
def test_files_that_the_pages_name_are_there(page: str):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:[a-z_0-9]+/)+[A-Za-z_0-9.]+\.(?:py|md|sh|toml|jsonl|json|png)\b", text))
    named |= {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    folders = (ROOT, ROOT / "retool_mcore", path.parent)
    made = re.compile(r"runs/|data/[\w.]+\.jsonl|data/gsm8k/")  # by the page's own commands
    missing = [name for name in named if not made.match(name) and not any((each / name).exists() for each in folders)]
    assert not missing


def test_scripts_and_cases_that_the_results_name_are_there():
    text = (PERF / "RESULTS.md").read_text(encoding="utf-8")
    scripts = set(re.findall(r"python(?: -W ignore)? (perf/\w+\.py)", text))
    assert len(scripts) > 5 and not [name for name in scripts if not (ROOT / name).exists()]
    cases = set(re.findall(r"perf/bench\.py (\w+)", text))
    assert cases and not [case for case in cases if f"[{case}]" not in CASES.read_text(encoding="utf-8")]
