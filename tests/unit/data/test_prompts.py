"""Each problem has one prompt format everywhere, and a template's date is that of the run."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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
from retool_mcore.errors import ConfigError, DataError
from retool_mcore.platforms import get_platform
from retool_mcore.preflight.check import CheckScope, check, require

FORMATS = [
    PromptFormat(),
    PromptFormat(system="Be brief.", instruction=""),
    PromptFormat(system="Be brief.", instruction="Think first.\nAnswer in German."),
    PromptFormat(instruction=""),
]
PROBLEM = "A bus has 31 seats. How many seats have 7 such buses?"
DAPO = next(wrapper for wrapper in WRAPPERS if wrapper.name == "DAPO")
WRAPPED = f"{DAPO.heads[0]}\n\n{PROBLEM}\n\n{DAPO.tails[0]}"


# ------------------------------------------------------- the format of prompts


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
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "\\boxed{217}"}]
    sft_row = await Conversion(protocol).row("here", {"messages": talk})
    raw = {"prompt": [{"role": "user", "content": WRAPPED}], "reward_model": {"ground_truth": "217"}}
    (row,) = convert_rl([("here", raw)], "x").rows
    assert sft_row["messages"][0]["content"] == prompt_of(row["prompt"][0]["content"])
    assert messages_of(raw["prompt"]) == row["prompt"] == [{"role": "user", "content": hermes_prompt(PROBLEM)}]


@pytest.mark.parametrize(
    "content",
    [
        f"{PROBLEM}\n{ANSWER_FORMAT}",
        "What is 1 + 1? Answer as \\boxed{n}.",
        f"Answer in French. {PROBLEM}",
        "Let's think step by step and output the final answer within \\boxed{}.",  # only an instruction
    ],
)
def test_a_prompt_without_a_foreign_instruction_stays_unchanged(content: str):
    assert messages_of([{"role": "user", "content": content}])[0]["content"] == content
    assert hermes_prompt(content).count("\\boxed") == 1


def test_only_user_turns_are_rewritten():
    prompt = [
        {"role": "system", "content": WRAPPED},
        {"role": "user", "content": WRAPPED, "name": None},
        {"role": "assistant", "content": DAPO.tails[0], "tool_calls": [{"id": "1"}]},
    ]
    assert messages_of(prompt) == [prompt[0], {"role": "user", "content": hermes_prompt(PROBLEM)}, prompt[2]]


@pytest.mark.parametrize(
    ("used", "differs"),
    [
        (PromptFormat(system="Be brief.", instruction="", protocol="hermes"), False),
        (PromptFormat(system="Be brief.", instruction=""), False),
        (PromptFormat(system="Be brief.", instruction="", protocol="qwen3_coder"), True),
        (PromptFormat(system="Be long.", instruction="", protocol="hermes"), True),
        (PromptFormat(protocol="hermes"), True),
    ],
    ids=str,
)
def test_a_difference_from_the_models_record_is_one_warning(tmp_path: Path, used: PromptFormat, differs: bool):
    assert difference(str(tmp_path), used, "own.parquet", "Do this.") == [], "no record"
    known = PromptFormat(system="Be brief.", instruction="", protocol="hermes")
    known.write(tmp_path)
    warning = (
        f"own.parquet uses a prompt format that {tmp_path} was not trained with, which costs accuracy. Here: {used}. "
        f"The model: {known}. Do this."
    )
    assert difference(str(tmp_path), used, "own.parquet", "Do this.") == [warning] * differs


def test_the_inline_format_ignores_the_instruction():
    inline = format_of_prompts([[{"role": "user", "content": retool_prompt("What is 1 + 1?")}]])
    assert inline.protocol == "retool"
    assert not inline.differs_from(PromptFormat(instruction=ANSWER_FORMAT, protocol="retool"))
    assert inline.differs_from(PromptFormat(protocol="hermes"))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    once = retool_messages(turns)
    assert once == [turns[0], {"role": "user", "content": retool_prompt("1 + 1?")}] == retool_messages(once)


def test_an_unreadable_record_is_an_error(tmp_path: Path):
    for broken in ("{", '{"systen": ""}', '{"system": 3}', "[]"):
        (tmp_path / FORMAT_FILE).write_text(broken)
        with pytest.raises(DataError, match=FORMAT_FILE):
            recorded_format(tmp_path)
    (tmp_path / FORMAT_FILE).write_text('{"date": "tomorrow"}')
    with pytest.raises(DataError, match="date = 'tomorrow' is not a date"):
        date_of(tmp_path)


def test_rollout_uses_the_models_format(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"problem": "1 + 1?"}\n')
    PromptFormat(system="Solve it.", instruction="").write(tmp_path)
    assert read_prompts(prompts, str(tmp_path)) == [
        [{"role": "system", "content": "Solve it."}, {"role": "user", "content": "1 + 1?"}]
    ]
    assert read_prompts(prompts, "owner/name") == [PromptFormat().messages("1 + 1?")]


# ------------------------------------------------------- checks before a run


def rl_file(path: Path, *contents: str) -> Path:
    rows = [
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": content}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        for number, content in enumerate(contents)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def config_of(train: Path, val: Path, *settings: str) -> RlConfig:
    files = [f"data.train_file={train}", f"validation.files={json.dumps([str(val)])}"]
    return load_config(RlConfig, "configs/rl_tiny_cpu.toml", [*files, *settings])


def test_a_note_counts_the_replaced_instructions(tmp_path: Path):
    train = rl_file(tmp_path / "train.parquet", WRAPPED, WRAPPED.replace("31", "47"), "How much is 3 * 4 * 5?")
    val = rl_file(tmp_path / "val.parquet", "Name the fifth prime number.")
    rendered: list[str] = []

    def render_turns(messages: Any) -> list[int]:
        rendered.append(messages[-1]["content"])
        return [1]

    config = config_of(train, val, "train.prompts_per_step=2", "train.mini_batch_prompts=2")
    (note,) = check_prompts(config, render_turns)
    assert rendered[0] == hermes_prompt(PROBLEM)
    assert "train.parquet" in note and "DAPO in 2 rows" in note
    pq.write_table(pq.read_table(val).append_column("images", pa.array([["a.png"]])), val)
    with pytest.raises(DataError, match=r"val\.parquet, row 0, column images: the row needs more than text"):
        check_prompts(config, render_turns)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"problem": "2 + 2", "answer": "4"},
            r"no column data_source, prompt, reward_model; it has problem, answer\. `retool data rl`",
        ),
        (
            {"data_source": "math", "prompt": "2 + 2", "reward_model": {"ground_truth": "4"}},
            "row 0, column prompt: '2 . 2' is not a list of messages",
        ),
        (
            {"data_source": "math", "prompt": [{"role": "user", "content": "2 + 2"}], "reward_model": "4"},
            "row 0, column reward_model: '4' has no ground_truth",
        ),
    ],
)
def test_a_wrong_file_is_an_error_before_its_rows_are_tokenized(tmp_path: Path, row: dict[str, Any], problem: str):
    train, val = rl_file(tmp_path / "train.parquet", "2 + 2"), tmp_path / "val.parquet"
    pq.write_table(pa.Table.from_pylist([row]), val)
    config = config_of(train, val, f"run.root={tmp_path}/runs")
    with pytest.raises(ConfigError, match=rf"^\S*val\.parquet.*{problem}"):
        require(check(config, CheckScope(platform=get_platform("cpu"), is_target=False)))  # there is no model
    pq.write_table(pq.read_table(train).slice(0, 0), train)
    with pytest.raises(ConfigError, match=r"^\S*train\.parquet.*no rows"):
        require(check(config, CheckScope(platform=get_platform("cpu"), is_target=False)))


# ------------------------------------------------------- templates with today's date

TEMPLATE = (
    '{%- set today = strftime_now("%Y-%m-%d") %}<|im_start|>system\nThe current date is {{ today }}.<|im_end|>\n'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    '{% if message.role == "tool" %}{{ strftime_now("%d.%m.%Y") }}: {% endif %}'
    "{% if message.tool_calls %}<tool_call>\n{{ message.tool_calls[0].function | tojson }}\n</tool_call>"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRACE = [
    {"role": "user", "content": "How much is 2 + 2?"},
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
