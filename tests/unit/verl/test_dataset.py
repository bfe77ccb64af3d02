"""Files as verl's preprocessing scripts and others write them, read by our dataset as verl's
trainer does.
"""

from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import read_jsonl, write_parquet
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from retool_mcore.platforms import get_platform
from retool_mcore.rollout.protocol import Hermes
from retool_mcore.verl.keys.tree import ppo_keys
from tests.unit.verl.loss_scenario import RL

# Rows of verl's gsm8k_multiturn_w_tool.py, with a tool of verl's and its loop; rows of DAPO; and
# "plain" ones: numbers for truths, no extra_info, a key that only some turns have, and columns with
# names that verl uses.
FORMS = {each["form"]: each["rows"] for _, each in read_jsonl(Path(__file__).with_name("published_rows.jsonl"))}


def files(folder: Path, *forms: str) -> list[str]:
    for name in forms:
        write_parquet(folder / f"{name}.parquet", FORMS[name])
    return [str(folder / f"{name}.parquet") for name in forms]


@pytest.fixture
def dataset(tokenizer, verl_on_cpu):
    from retool_mcore.verl.dataset import ReToolDataset

    return lambda paths: ReToolDataset(data_files=paths, tokenizer=tokenizer, config=None, max_samples=-1)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_reaches_the_loop_without_its_agent_and_its_other_columns(dataset, tmp_path: Path, form: str):
    rows = dataset(files(tmp_path, form))
    assert len(rows) == 3
    row, stored = rows[1], FORMS[form][1]
    row.pop("dummy_tensor")
    extra_info = stored.get("extra_info", {})
    assert row == {
        "data_source": stored["data_source"],
        "extra_info": extra_info,
        "index": extra_info.get("index", 0),
        "raw_prompt": stored["prompt"],  # turns as in the file, without its nulls
        "reward_model": {"ground_truth": "4"},
        "row": 1,
        "held_out": False,
    }


def test_files_of_other_columns_are_counted_through_as_the_evaluation_counts_them(dataset, tmp_path: Path):
    paths = files(tmp_path, "dapo", "multiturn_w_tool", "plain")
    rows = dataset(paths)
    problems = read_problems([Path(path) for path in paths])
    assert [(rows[i]["row"], rows[i]["raw_prompt"], rows[i]["reward_model"]["ground_truth"]) for i in range(9)] == [
        (problem.id, problem.messages, problem.truth) for problem in problems
    ]
    assert [problem.id for problem in read_problems([Path(path) for path in paths], limit=4)] == [0, 1, 2, 3]


def config_of(train: str, held_out: str, prompts: int, *settings: str) -> RlConfig:
    words = [f"data.train_file={train}", f'validation.files=["{held_out}"]', "data.max_prompt_tokens=300"]
    words += [f"train.prompts_per_step={prompts}", "train.mini_batch_prompts=1", "data.allow_overlap=true"]
    return load_config(RlConfig, RL, [*words, *settings])


def test_a_folder_of_files_is_read_whole_by_the_checks_and_by_verl(dataset, tokenizer, tmp_path: Path):
    (tmp_path / "parts").mkdir()
    parts = files(tmp_path / "parts", "dapo", "multiturn_w_tool")
    [held_out] = files(tmp_path, "plain")
    render = Hermes(tokenizer).prompt_ids
    config = config_of(f"{tmp_path}/parts", held_out, 6)
    [note] = check_prompts(config, render)
    assert "multiturn_w_tool.parquet: its column agent_name is ignored" in note
    handed_on = ppo_keys(config, get_platform("cpu"))["data.train_files"]
    assert handed_on == parts and len(dataset(handed_on)) == 6
    with pytest.raises(DataError, match=r"parts has 6 rows, fewer than train.prompts_per_step = 7"):
        check_prompts(config_of(f"{tmp_path}/parts", held_out, 7), render)


def test_rows_without_a_truth_and_a_data_source_that_no_problem_has_are_named(tokenizer, tmp_path: Path):
    train, held_out = files(tmp_path, "plain", "dapo")
    render, size = Hermes(tokenizer).prompt_ids, ("validation.every=8", "validation.n=4")
    there = "Choose one of: val-core/math_dapo/acc/mean@4"
    with pytest.raises(DataError, match=there):
        check_prompts(config_of(train, held_out, 2, *size, "best.metric=val-core/mine/acc/mean@4"), render)
    check_prompts(config_of(train, held_out, 2, *size, "best.metric=val-core/math_dapo/acc/mean@4"), render)
    write_parquet(held_out, [{**FORMS["dapo"][0], "reward_model": {"ground_truth": None, "style": "rule"}}])
    with pytest.raises(DataError, match=r"dapo.parquet, row 0, column reward_model: ground_truth: .* None"):
        check_prompts(config_of(train, held_out, 2), render)
