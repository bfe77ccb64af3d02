"""A problem is put to the model in one way everywhere, and a difference is one warning."""

from pathlib import Path

import pytest

from retool_mcore.cli.rollout import read_prompts
from retool_mcore.data.files import write_parquet
from retool_mcore.data.prompt_format import (
    ANSWER_FORMAT,
    FORMAT_FILE,
    PromptFormat,
    difference,
    format_of_file,
    format_of_prompts,
    recorded_format,
    retool_prompt,
)
from retool_mcore.data.rl import convert_rl
from retool_mcore.data.tasks import SYSTEM_PROMPT, problems, rl_row, tool_trace
from retool_mcore.errors import DataError

FORMATS = [
    PromptFormat(),
    PromptFormat(system="Be brief.", instruction=""),
    PromptFormat(system="Be brief.", instruction="Think first.\nAnswer in German."),
    PromptFormat(instruction=""),
]


@pytest.mark.parametrize("wanted", FORMATS, ids=str)
def test_the_format_of_prompts_is_the_one_they_were_written_in(wanted: PromptFormat):
    asked = [wanted.messages(f"What is {n} + 1?\nn is {n}.") for n in range(20)]
    assert format_of_prompts(asked) == wanted


def test_the_quickstarts_sft_rl_and_a_converted_file_put_a_problem_in_one_way(tmp_path: Path):
    stream = problems(seed=0)
    chosen = [next(stream) for _ in range(10)]
    write_parquet(tmp_path / "sft.parquet", [tool_trace(each, wrong=False) for each in chosen])
    write_parquet(tmp_path / "rl.parquet", [rl_row(each, "train", 0) for each in chosen])
    trained = format_of_file(tmp_path / "sft.parquet")
    assert trained == format_of_file(tmp_path / "rl.parquet") == PromptFormat(system=SYSTEM_PROMPT, instruction="")
    bare = [("here", {"problem": each.question, "answer": each.answer}) for each in chosen]
    converted = [row["prompt"] for row in convert_rl(bare, "own", prompt_format=trained).rows]
    assert converted == [rl_row(each, "train", 0)["prompt"] for each in chosen]


def test_a_problem_that_asks_for_a_box_itself_is_not_asked_twice():
    (user,) = PromptFormat().messages("What is 1 + 1? Answer as \\boxed{n}.")
    assert user["content"] == "What is 1 + 1? Answer as \\boxed{n}."


def test_the_papers_inline_form_is_a_protocol_whose_instruction_is_its_own():
    asked = format_of_prompts([[{"role": "user", "content": retool_prompt("What is 1 + 1?")}]])
    assert asked.protocol == "retool"
    assert not asked.differs_from(PromptFormat(instruction=ANSWER_FORMAT, protocol="retool"))
    assert asked.differs_from(PromptFormat(protocol="hermes"))


@pytest.mark.parametrize(
    ("asked", "differs"),
    [
        (PromptFormat(system="Be brief.", instruction="", protocol="hermes"), False),
        (PromptFormat(system="Be brief.", instruction=""), False),
        (PromptFormat(system="Be brief.", instruction="", protocol="qwen3_coder"), True),
        (PromptFormat(system="Be long.", instruction="", protocol="hermes"), True),
        (PromptFormat(protocol="hermes"), True),
    ],
    ids=str,
)
def test_a_difference_from_the_models_record_is_one_warning(tmp_path: Path, asked: PromptFormat, differs: bool):
    PromptFormat(system="Be brief.", instruction="", protocol="hermes").write(tmp_path)
    said = difference(str(tmp_path), asked, "own.parquet", "Do this.")
    assert len(said) == differs
    for line in said:
        assert (
            line.startswith("own.parquet uses another prompt format")
            and line.endswith("Do this.")
            and '"Be brief."' in line
        )


def test_a_model_without_a_record_is_asked_as_it_comes_and_a_broken_record_is_an_error(tmp_path: Path):
    assert recorded_format(tmp_path) is None
    assert difference(str(tmp_path), FORMATS[1], "own.parquet", "") == []
    for broken in ("{", '{"systen": ""}', '{"system": 3}', "[]"):
        (tmp_path / FORMAT_FILE).write_text(broken)
        with pytest.raises(DataError, match=FORMAT_FILE):
            recorded_format(tmp_path)


def test_rollout_puts_a_bare_problem_as_the_model_was_asked(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"problem": "1 + 1?"}\n')
    PromptFormat(system="Solve it.", instruction="").write(tmp_path)
    (asked,) = read_prompts(prompts, str(tmp_path))
    assert asked == [{"role": "system", "content": "Solve it."}, {"role": "user", "content": "1 + 1?"}]
    (asked,) = read_prompts(prompts, "owner/name")
    assert asked == [{"role": "user", "content": "1 + 1?\nPut your final answer within \\boxed{}."}]
