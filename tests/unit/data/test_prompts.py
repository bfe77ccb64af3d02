"""Each problem has one prompt format everywhere, and a template's date is that of the run."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.cli.rollout import read_prompts
from retool_mcore.config import RlConfig, load_config
from retool_mcore.config.model import Model
from retool_mcore.config.shared import END_OF_TURN, FORMAT_FILE
from retool_mcore.data import prompt_format
from retool_mcore.data.chat import render, render_prompt, tool_turn_ids
from retool_mcore.data.convert import Conversion
from retool_mcore.data.files import write_parquet
from retool_mcore.data.prompt_format import (
    ANSWER_FORMAT,
    QUESTION_HEADER,
    WRAPPERS,
    PromptFormat,
    date_of,
    difference,
    format_of_file,
    format_of_prompts,
    hermes_prompt,
    pin_date,
    record_format,
    recorded_format,
    retool_messages,
    retool_prompt,
)
from retool_mcore.data.rl import convert_rl
from retool_mcore.data.rl_prompts import check_prompts, messages_of
from retool_mcore.data.tasks import SYSTEM_PROMPT, problems, rl_row, tool_trace
from retool_mcore.data.tokenizer import load_tokenizer, tokenizer_of
from retool_mcore.data.tool import tool_call
from retool_mcore.errors import DataError

FORMATS = [
    PromptFormat(),
    PromptFormat(system="Be brief.", instruction=""),
    PromptFormat(system="Be brief.", instruction="Think first.\nAnswer in German."),
    PromptFormat(instruction=""),
]
PROBLEM = "A bus has 31 seats. How many seats have 7 such buses?"
DAPO = next(wrapper for wrapper in WRAPPERS if wrapper.name == "DAPO")
WRAPPED = f"{DAPO.heads[0]}\n\n{PROBLEM}\n\n{DAPO.tails[0]}"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("wanted", FORMATS, ids=str)
def test_the_format_is_inferred_from_the_prompts(wanted: PromptFormat):
    prompts = [wanted.messages(f"What is {n} + 1?\nn is {n}.") for n in range(20)]
    assert format_of_prompts(prompts) == wanted
    known = wanted.instruction if wanted.instruction == ANSWER_FORMAT else ""
    assert format_of_prompts(prompts[:1] * 2) == replace(wanted, instruction=known), "one problem"


def test_the_quickstarts_files_and_a_converted_file_have_one_format(tmp_path: Path):
    stream = problems(seed=0)
    chosen = [next(stream) for _ in range(10)]
    write_parquet(tmp_path / "sft.parquet", [tool_trace(problem, wrong=False) for problem in chosen])
    write_parquet(tmp_path / "rl.parquet", [rl_row(problem, "train", 0) for problem in chosen])
    trained = format_of_file(tmp_path / "sft.parquet")
    assert trained == format_of_file(tmp_path / "rl.parquet") == PromptFormat(system=SYSTEM_PROMPT, instruction="")
    for protocol in ("", "llama3"):
        record_format(tmp_path, str(tmp_path / "sft.parquet"), ("<|im_end|>", 7), protocol)
        assert recorded_format(tmp_path) == replace(trained, protocol=protocol)
    assert json.loads((tmp_path / FORMAT_FILE).read_text())[END_OF_TURN] == {"token": "<|im_end|>", "id": 7}
    plain = [("here", {"problem": problem.question, "answer": problem.answer}) for problem in chosen]
    converted = [row["prompt"] for row in convert_rl(plain, "own", prompt_format=trained).rows]
    assert converted == [rl_row(problem, "train", 0)["prompt"] for problem in chosen]


@pytest.mark.parametrize(("protocol", "prompt_of"), [("hermes", hermes_prompt), ("retool", retool_prompt)])
async def test_sft_and_rl_have_the_same_prompt(protocol: Any, prompt_of: Callable[[str], str]):
    content = f"You may write code.\n\n{QUESTION_HEADER}\n{PROBLEM}"
    talk = [user(content), {"role": "assistant", "content": "\\boxed{217}"}]
    sft_row = await Conversion(protocol).row("here", {"messages": talk})
    raw = {"prompt": [user(WRAPPED)], "reward_model": {"ground_truth": "217"}}
    (row,) = convert_rl([("here", raw)], "x").rows
    assert sft_row["messages"][0]["content"] == prompt_of(row["prompt"][0]["content"])
    assert messages_of(raw["prompt"]) == row["prompt"] == [user(hermes_prompt(PROBLEM))]


def test_only_user_turns_with_a_foreign_instruction_are_rewritten():
    for content in (
        f"{PROBLEM}\n{ANSWER_FORMAT}",
        "What is 1 + 1? Answer as \\boxed{n}.",
        f"Answer in French. {PROBLEM}",
        "Let's think step by step and output the final answer within \\boxed{}.",  # only an instruction
    ):
        assert messages_of([user(content)]) == [user(content)]
        assert hermes_prompt(content).count("\\boxed") == 1
    prompt = [
        {"role": "system", "content": WRAPPED},
        {"role": "user", "content": WRAPPED, "name": None},
        {"role": "assistant", "content": DAPO.tails[0], "tool_calls": [{"id": "1"}]},
    ]
    assert messages_of(prompt) == [prompt[0], user(hermes_prompt(PROBLEM)), prompt[2]]


def test_a_difference_from_the_models_record_is_one_warning(tmp_path: Path):
    known = PromptFormat(system="Be brief.", instruction="", protocol="hermes")
    assert difference(str(tmp_path), PromptFormat(), "own.parquet", "Do this.") == [], "no record"
    known.write(tmp_path)
    for used, differs in (
        (known, False),
        (replace(known, protocol=""), False),
        (replace(known, protocol="qwen3_coder"), True),
        (replace(known, system="Be long."), True),
        (replace(known, instruction=ANSWER_FORMAT), True),
    ):
        found = difference(str(tmp_path), used, "own.parquet", "Do this.")
        assert len(found) == differs, used
        assert all(f"Here: {used}. The model: {known}. Do this." in warning for warning in found)


def test_the_inline_format_ignores_the_instruction():
    inline = format_of_prompts([[user(retool_prompt("What is 1 + 1?"))]])
    assert inline.protocol == "retool"
    assert not inline.differs_from(PromptFormat(instruction=ANSWER_FORMAT, protocol="retool"))
    assert inline.differs_from(PromptFormat(protocol="hermes"))
    turns = [{"role": "system", "content": "Be brief."}, user("1 + 1?")]
    once = retool_messages(turns)
    assert once == [turns[0], user(retool_prompt("1 + 1?"))] == retool_messages(once)


def test_rollout_uses_the_models_format(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"problem": "1 + 1?"}\n')
    PromptFormat(system="Solve it.", instruction="").write(tmp_path)
    assert read_prompts(prompts, str(tmp_path)) == [[{"role": "system", "content": "Solve it."}, user("1 + 1?")]]
    assert read_prompts(prompts, "owner/name") == [PromptFormat().messages("1 + 1?")]


def test_a_note_counts_the_replaced_instructions_and_images_are_refused(tmp_path: Path):
    contents = (WRAPPED, WRAPPED.replace("31", "47"), "How much is 3 * 4 * 5?")
    reward = {"style": "rule", "ground_truth": "4"}
    rows = [{"data_source": "math", "prompt": [user(content)], "reward_model": reward} for content in contents]
    write_parquet(tmp_path / "train.parquet", rows)
    write_parquet(tmp_path / "val.parquet", rows[2:])
    files = [f"data.train_file={tmp_path}/train.parquet", f'validation.files=["{tmp_path}/val.parquet"]']
    size = ["train.prompts_per_step=2", "train.mini_batch_prompts=2"]
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [*files, *size])
    rendered: list[str] = []

    def render_turns(messages: Any) -> list[int]:
        rendered.append(messages[-1]["content"])
        return [1]

    (note,) = check_prompts(config, render_turns)
    assert rendered[0] == hermes_prompt(PROBLEM)
    assert "train.parquet" in note and "DAPO in 2 rows" in note
    write_parquet(tmp_path / "val.parquet", [{**rows[2], "images": ["a.png"]}])
    with pytest.raises(DataError, match=r"val\.parquet, row 0, column images: the row needs more than text"):
        check_prompts(config, render_turns)


TEMPLATE = (
    '{%- set today = strftime_now("%Y-%m-%d") %}<|im_start|>system\nThe current date is {{ today }}.<|im_end|>\n'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    '{% if message.role == "tool" %}{{ strftime_now("%d.%m.%Y") }}: {% endif %}'
    "{% if message.tool_calls %}<tool_call>\n{{ message.tool_calls[0].function | tojson }}\n</tool_call>"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRACE = [
    user("How much is 2 + 2?"),
    {"role": "assistant", "content": "", "tool_calls": [tool_call("print(2 + 2)")]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is \\boxed{4}."},
]
WEST, EAST = "Etc/GMT+12", "Pacific/Kiritimati"  # 26 hours apart, so never on one day


@pytest.fixture
def move_to(monkeypatch: pytest.MonkeyPatch):
    """Move this process to another time zone, and return the day there."""

    def move(zone: str) -> date:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        return date.today()

    yield move
    monkeypatch.undo()
    time.tzset()
    prompt_format._today.cache_clear()


@pytest.fixture
def model(tmp_path: Path, model_dir: Path) -> Model:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return Model(path=str(tmp_path / "model"), dtype="float32")


def texts(tokenizer: Any) -> list[str]:
    """An SFT row, a prompt of RL and evaluation, and a rollout's text after a call."""
    pieces = render(TRACE, None, tokenizer).token_ids, render_prompt(TRACE[:1], None, tokenizer)
    return [tokenizer.decode(ids) for ids in (*pieces, tool_turn_ids(tokenizer, "4"))]


def test_a_run_keeps_the_day_of_its_start_after_a_resume_and_for_its_export(tmp_path: Path, model: Model, move_to):
    first = move_to(WEST)
    prompt_format._today.cache_clear()
    pin_date(tmp_path / "run", model.path)
    before = texts(tokenizer_of(model, day=date_of(tmp_path / "run", model.path)))
    assert f"{first:%Y-%m-%d}" in before[1] and f"{first:%d.%m.%Y}: 4" in before[2]
    assert move_to(EAST) != first
    assert texts(load_tokenizer(model.path)) == before, "a process keeps its day past midnight"
    prompt_format._today.cache_clear()  # a new process
    PromptFormat(system="s").write(tmp_path / "run", ("<|im_end|>", 1))  # as each start does
    pin_date(tmp_path / "run", model.path)
    assert texts(tokenizer_of(model, day=date_of(tmp_path / "run", model.path))) == before
    assert texts(tokenizer_of(model, day=date_of(tmp_path / "another run", model.path))) != before
    export = shutil.copytree(model.path, tmp_path / "export")
    shutil.copy(tmp_path / "run" / FORMAT_FILE, export)
    assert recorded_format(export) == PromptFormat(system="s")
    assert texts(load_tokenizer(str(export))) == before, "as retool data does"
    pin_date(tmp_path / "evaluation", str(export))
    assert texts(tokenizer_of(model, str(export), day=date_of(tmp_path / "evaluation"))) == before


def test_the_day_of_a_run_precedes_that_of_its_model(tmp_path: Path):
    for folder, day in (("run", "2026-11-28"), ("export", "2026-11-27")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FORMAT_FILE).write_text(json.dumps({"date": day}))
    assert pin_date(tmp_path / "run", str(tmp_path / "export")) == date(2026, 11, 28)
    assert pin_date(tmp_path / "new run", str(tmp_path / "export")) == date(2026, 11, 27)
