"""Files as verl's preprocessing scripts and others write them, read by our dataset as verl's
trainer does.
"""

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import read_jsonl, write_parquet
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from retool_mcore.platforms import get_platform
from retool_mcore.rollout.protocol import Hermes
from retool_mcore.verl.keys.tree import ppo_keys

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"
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
    [path] = files(tmp_path, form)
    rows = dataset([path])
    assert len(rows) == 3
    row = rows[1]
    assert set(row) == {
        *("data_source", "extra_info", "index", "dummy_tensor", "raw_prompt", "reward_model", "row", "held_out")
    }
    assert row["reward_model"] == {"ground_truth": "4"}
    extra_info = FORMS[form][1].get("extra_info", {})
    assert (row["extra_info"], row["index"]) == (extra_info, extra_info.get("index", 0))
    assert (row["row"], row["held_out"], row["data_source"]) == (1, False, FORMS[form][1]["data_source"])
    assert row["raw_prompt"] == FORMS[form][1]["prompt"], "turns as in the file, without its nulls"


def test_files_of_other_columns_are_counted_through_as_the_evaluation_counts_them(dataset, tmp_path: Path):
    paths = files(tmp_path, "dapo", "multiturn_w_tool", "plain")
    rows = dataset(paths)
    problems = read_problems([Path(path) for path in paths])
    assert [(rows[i]["row"], rows[i]["raw_prompt"], rows[i]["reward_model"]["ground_truth"]) for i in range(9)] == [
        (problem.id, problem.messages, problem.truth) for problem in problems
    ]
    assert [problem.id for problem in read_problems([Path(path) for path in paths], limit=4)] == [0, 1, 2, 3]


def config_of(tmp_path: Path, *forms: str) -> RlConfig:
    train, *held_out = files(tmp_path, *forms)
    quoted = ", ".join(f'"{path}"' for path in held_out)
    size = ("train.prompts_per_step=2", "train.mini_batch_prompts=2", "data.max_prompt_tokens=300")
    return load_config(RlConfig, RL, [f"data.train_file={train}", f"validation.files=[{quoted}]", *size])


def test_a_folder_of_files_is_read_whole_by_the_checks_and_by_verl(dataset, tokenizer, tmp_path: Path):
    (tmp_path / "parts").mkdir()
    parts = files(tmp_path / "parts", "dapo", "multiturn_w_tool")
    [held_out] = files(tmp_path, "plain")
    words = [f"data.train_file={tmp_path}/parts", f'validation.files=["{held_out}"]', "data.allow_overlap=true"]
    words += ["train.mini_batch_prompts=1", "data.max_prompt_tokens=300"]
    config = load_config(RlConfig, RL, [*words, "train.prompts_per_step=6"])
    render = Hermes(tokenizer).prompt_ids
    check_prompts(config, render)
    handed_on = ppo_keys(config, get_platform("cpu"))["data.train_files"]
    assert handed_on == parts and len(dataset(handed_on)) == 6
    with pytest.raises(DataError, match=r"parts has 6 rows, fewer than train.prompts_per_step = 7"):
        check_prompts(load_config(RlConfig, RL, [*words, "train.prompts_per_step=7"]), render)


def test_an_ignored_agent_is_told_once_for_its_file(tokenizer, tmp_path: Path):
    notes = check_prompts(config_of(tmp_path, "multiturn_w_tool", "dapo", "plain"), Hermes(tokenizer).prompt_ids)
    assert len(notes) == 1
    assert "multiturn_w_tool.parquet: its column agent_name is ignored" in notes[0]
    assert check_prompts(config_of(tmp_path, "dapo", "plain"), Hermes(tokenizer).prompt_ids) == []


def test_a_row_without_a_truth_is_named_before_anything_starts(tokenizer, tmp_path: Path):
    config = config_of(tmp_path, "dapo", "plain")
    rows = [{**row, "reward_model": {"ground_truth": None, "style": "rule"}} for row in FORMS["plain"][:2]]
    write_parquet(config.validation.files[0], rows)
    with pytest.raises(DataError, match=r"plain.parquet, row 0, column reward_model: ground_truth: .* None"):
        check_prompts(config, Hermes(tokenizer).prompt_ids)


def test_the_best_of_a_data_source_that_no_problem_has_is_refused_with_those_there_are(tokenizer, tmp_path: Path):
    config = config_of(tmp_path, "plain", "dapo", "multiturn_w_tool")

    def goal(source: str) -> RlConfig:
        best = config.best.model_copy(update={"metric": f"val-core/{source}/acc/mean@8"})
        return config.model_copy(update={"best": best})

    there = "Choose one of: val-core/math_dapo/acc/mean@8, val-core/openai/gsm8k/acc/mean@8"
    with pytest.raises(DataError, match=there):
        check_prompts(goal("mine"), Hermes(tokenizer).prompt_ids)
    assert check_prompts(goal("openai/gsm8k"), Hermes(tokenizer).prompt_ids)
