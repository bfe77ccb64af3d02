"""Templates with today's date write one day in a run, when it is resumed, and for its export."""

import json
import shutil
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config.model import Model
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data import prompt_format
from retool_mcore.data.chat import render, render_prompt, tool_turn_ids
from retool_mcore.data.prompt_format import PromptFormat, date_of, pin_date, recorded_format
from retool_mcore.data.tokenizer import load_tokenizer, tokenizer_of
from retool_mcore.data.tool import tool_call

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ MARK }}"
    "{% if message.tool_calls %}<tool_call>\n{{ message.tool_calls[0].function | tojson }}\n</tool_call>"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_USER_TURN = '{% if message.role == "user" %}[{{ strftime_now("%A, %B %d, %Y") }}] {% endif %}'
IN_RESULT = '{% if message.role == "tool" %}{{ strftime_now("%d.%m.%Y") }}: {% endif %}'


def in_system_turn(text: str) -> str:
    return f"<|im_start|>system\n{text}<|im_end|>\n" + TURNS.replace("{{ MARK }}", "")


TEMPLATES = {  # name -> template, and how it writes a day
    "as of Mistral Small": (
        '{%- set today = strftime_now("%Y-%m-%d") %}' + in_system_turn("The current date is {{ today }}."),
        "{:%Y-%m-%d}",
    ),
    "as of Llama 3.2": (
        '{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b'
        ' %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}'
        + in_system_turn("Today Date: {{ date_string }}"),
        "Today Date: {:%d %b %Y}",
    ),
    "in the user's turn": (TURNS.replace("{{ MARK }}", IN_USER_TURN), "[{:%A, %B %d, %Y}]"),
    "in a result": (TURNS.replace("{{ MARK }}", IN_RESULT), "{:%d.%m.%Y}: 4"),
}
QUESTION = {"role": "user", "content": "How much is 2 + 2?"}
TRACE = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [tool_call("print(2 + 2)")]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is \\boxed{4}."},
]
WEST, EAST = "Etc/GMT+12", "Pacific/Kiritimati"  # 26 hours apart, so never on one day


@pytest.fixture
def start_in(monkeypatch: pytest.MonkeyPatch):
    """Let a new process start on the day of a time zone."""

    def start(zone: str) -> date:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        prompt_format._today.cache_clear()
        return date.today()

    yield start
    monkeypatch.undo()
    time.tzset()
    prompt_format._today.cache_clear()


@pytest.fixture
def model(tmp_path: Path, model_dir: Path) -> Callable[[str], Model]:
    """A model whose tokenizer has a template."""

    def made(template: str) -> Model:
        shutil.copytree(model_dir, tmp_path / "model")
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
        return Model(path=str(tmp_path / "model"), dtype="float32")

    return made


def texts(tokenizer: Any) -> list[str]:
    """What SFT trains, what RL and evaluation ask, and what a rollout writes after a call."""
    pieces = render(TRACE, None, tokenizer).token_ids, render_prompt([QUESTION], None, tokenizer)
    return [tokenizer.decode(ids) for ids in (*pieces, tool_turn_ids(tokenizer, "4"))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_run_that_is_resumed_after_midnight_renders_the_day_of_its_start(tmp_path: Path, model, start_in, name: str):
    template, written = TEMPLATES[name]
    taken = model(template)
    first = start_in(WEST)
    pin_date(tmp_path / "run", taken.path)
    before = texts(tokenizer_of(taken, day=date_of(tmp_path / "run", taken.path)))
    assert any(written.format(first) in text for text in before)
    assert start_in(EAST) != first
    pin_date(tmp_path / "run", taken.path)
    PromptFormat(system="s").write(tmp_path / "run", ("<|im_end|>", 1))  # as each start does
    assert texts(tokenizer_of(taken, day=date_of(tmp_path / "run", taken.path))) == before
    another = texts(tokenizer_of(taken, day=date_of(tmp_path / "another run", taken.path)))
    assert another != before and any(written.format(date.today()) in text for text in another)


def test_a_process_that_runs_over_midnight_keeps_its_day(model, start_in):
    taken = model(TEMPLATES["as of Mistral Small"][0])
    first = start_in(WEST)
    tokenizer = load_tokenizer(taken.path)
    time_zone_of_tomorrow = pytest.MonkeyPatch()
    time_zone_of_tomorrow.setenv("TZ", EAST)
    time.tzset()
    assert date.today() != first
    assert texts(tokenizer) == texts(load_tokenizer(taken.path))
    assert f"{first:%Y-%m-%d}" in texts(tokenizer)[1]
    time_zone_of_tomorrow.undo()


def test_commands_evaluations_and_runs_take_the_day_of_an_export(tmp_path: Path, model, start_in):
    taken = model(TEMPLATES["as of Llama 3.2"][0])
    start_in(WEST)
    pin_date(tmp_path / "run", taken.path)
    PromptFormat(system="s").write(tmp_path / "run")
    trained = texts(tokenizer_of(taken, day=date_of(tmp_path / "run", taken.path)))
    export = shutil.copytree(taken.path, tmp_path / "export")
    shutil.copy(tmp_path / "run" / FORMAT_FILE, export)
    start_in(EAST)
    assert recorded_format(export) == PromptFormat(system="s")
    assert texts(load_tokenizer(str(export))) == trained, "as retool data does"
    pin_date(tmp_path / "evaluation", str(export))
    assert texts(tokenizer_of(taken, str(export), day=date_of(tmp_path / "evaluation"))) == trained
    pin_date(tmp_path / "rl", str(export))
    assert date_of(tmp_path / "rl") == date_of(tmp_path / "run")


def test_a_runs_own_day_comes_before_that_of_its_model(tmp_path: Path):
    for folder, day in (("run", "2026-11-28"), ("export", "2026-11-27")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FORMAT_FILE).write_text(json.dumps({"date": day}))
    assert pin_date(tmp_path / "run", str(tmp_path / "export")) == date(2026, 11, 28)
    assert pin_date(tmp_path / "new run", str(tmp_path / "export")) == date(2026, 11, 27)
