"""Prompts in verl's schema, as RL and `retool eval` ask them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.prompt_format import ANSWER_FORMAT, OURS, WRAPPERS, hermes_prompt, retool_prompt
from retool_mcore.data.rl_prompts import check_prompts, messages_of
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.preflight.check import Machine, check, require

PROBLEM = "A bus has 31 seats. How many seats have 7 such buses?"
DAPO = next(each for each in WRAPPERS if each.name == "DAPO")
WRAPPED = f"{DAPO.heads[0]}\n\n{PROBLEM}\n\n{DAPO.tails[0]}"
FOREIGN = [each for each in WRAPPERS if each.name not in OURS]


@pytest.mark.parametrize("wrapper", FOREIGN, ids=lambda each: each.name)
def test_a_problem_is_asked_as_our_data_asks_it(wrapper):
    heads, tails = wrapper.heads or ("",), wrapper.tails or ("",)
    for head in heads:
        for tail in tails:
            (turn,) = messages_of([{"role": "user", "content": f"{head}\n\n{PROBLEM}\n\n{tail}", "name": None}])
            assert turn == {"role": "user", "content": hermes_prompt(PROBLEM)}
            assert retool_prompt(turn["content"]) == retool_prompt(PROBLEM)


@pytest.mark.parametrize(
    "content",
    [
        PROBLEM,
        f"{PROBLEM}\n{ANSWER_FORMAT}",
        retool_prompt(PROBLEM),
        f"Answer in French. {PROBLEM}",
        "Let's think step by step and output the final answer within \\boxed{}.",  # nothing but an instruction
    ],
)
def test_a_prompt_without_a_known_wrapper_stays_as_it_is(content: str):
    wanted = hermes_prompt(PROBLEM) if content == retool_prompt(PROBLEM) else content
    assert messages_of([{"role": "user", "content": content}])[0]["content"] == wanted


def test_other_turns_stay_as_they_are():
    prompt = [
        {"role": "system", "content": WRAPPED},
        {"role": "user", "content": WRAPPED},
        {"role": "assistant", "content": DAPO.tails[0], "tool_calls": [{"id": "1"}]},
    ]
    assert messages_of(prompt) == [prompt[0], {"role": "user", "content": hermes_prompt(PROBLEM)}, prompt[2]]


def written(path: Path, contents: list[str]) -> Path:
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


def test_the_user_is_told_what_was_taken_off(tmp_path: Path):
    train = written(tmp_path / "train.parquet", [WRAPPED, WRAPPED.replace("31", "47"), "How much is 3 * 4 * 5?"])
    held_out = written(tmp_path / "val.parquet", ["Name the fifth prime number."])
    settings = [f"data.train_file={train}", f"validation.files={json.dumps([str(held_out)])}"]
    size = ["train.prompts_per_step=2", "train.mini_batch_prompts=2"]
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [*settings, *size])
    rendered: list[str] = []

    def render(messages):
        rendered.append(messages[-1]["content"])
        return [1]

    notes = check_prompts(config, render)
    assert rendered[0] == hermes_prompt(PROBLEM)
    assert len(notes) == 1 and "train.parquet" in notes[0] and "DAPO in 2 rows" in notes[0]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "no rows"),
        ([{"problem": "2 + 2", "answer": "4"}], r"no column data_source, prompt, reward_model; it has problem, answer"),
        (
            [{"data_source": "math", "prompt": "2 + 2", "reward_model": {"ground_truth": "4"}}],
            "row 0, column prompt: '2 . 2' is not a list of messages",
        ),
        (
            [{"data_source": "math", "prompt": [{"role": "user", "content": "2 + 2"}], "reward_model": "4"}],
            "row 0, column reward_model: '4' has no ground_truth",
        ),
    ],
)
def test_a_wrong_file_is_an_error_before_its_rows_are_tokenized(
    tmp_path: Path, rows: list[dict[str, object]], told: str
):
    which = "val" if rows else "train"
    files = {name: written(tmp_path / f"{name}.parquet", ["2 + 2"]) for name in ("train", "val")}
    table = pa.Table.from_pylist(rows) if rows else pq.read_table(files[which]).slice(0, 0)
    pq.write_table(table, files[which])
    settings = [f"data.train_file={files['train']}", f"validation.files={json.dumps([str(files['val'])])}"]
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [*settings, f"run.root={tmp_path}/runs"])
    with pytest.raises(ConfigError, match=rf"^\S*{which}\.parquet.*{told}"):
        require(check(config, Machine(platform=get_platform("cpu"), is_target=False)))  # there is no model
