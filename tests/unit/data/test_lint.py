"""What lint finds, and that training on its own validation set is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import write_parquet
from retool_mcore.data.lint import lint_file, read_problem_rows, require_disjoint
from retool_mcore.data.rl import rl_row
from retool_mcore.data.tasks import TaskSpec, make_task
from retool_mcore.errors import DataError
from retool_mcore.preflight import inputs
from retool_mcore.rollout.protocol import Retool
from tests.plain_chatml import with_template
from tests.unit.data.commands import succeed

ROOT = Path(__file__).parents[3]
LONG = "In a town there are many houses and every house has four windows and two doors, how many windows are there?"


def rl_file(path, *problems, truth="4"):
    write_parquet(path, [rl_row(problem, truth, "x", "train", index) for index, problem in enumerate(problems)])
    return str(path)


def sft_file(path, *problems, answer="\\boxed{4}"):
    rows = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": answer}], "tools": None}
        for p in problems
    ]
    write_parquet(path, rows)
    return str(path)


def test_the_quickstarts_data_is_clean(tmp_path):
    make_task(tmp_path, seed=1, spec=TaskSpec(sft_train=60, sft_val=20, rl_train=30, rl_val=10, eval=20))
    files = [str(tmp_path / f"{name}.parquet") for name in ("sft_train", "sft_val", "rl_train", "rl_val", "eval")]
    output = succeed("lint", *files, "--model", tmp_path / "model", "--max-tokens", "150").replace("\n", " ")
    assert "error" not in output
    assert "0 rows (0.0%) are over 150 tokens" in output
    assert "of the tokens carry loss" in output
    assert "no files share a problem" in output and "problems, " not in output


def test_repeats_and_lengths_are_told(tmp_path, tokenizer):
    path = sft_file(tmp_path / "a.parquet", "What is 1 + 1?", "what is  1+1?", "What is 2 + 2?")
    found = lint_file(path, tokenizer, max_tokens=5)
    assert found.errors == []
    assert found.notes[0] == "1 of 3 rows repeat a problem (one occurs 2 times)"
    assert found.notes[1].startswith("tokens per row: min ")
    assert found.notes[2] == "3 rows (100.0%) are over 5 tokens"
    assert sum(found.loss_tokens) < sum(found.lengths_tokens)
    assert found.notes[3].endswith(f"({min(found.loss_tokens)} in the row with the fewest)")


def test_a_model_without_tool_turns_measures_prompts_inline(tmp_path, tokenizer):
    plain = with_template(tokenizer)
    found = lint_file(rl_file(tmp_path / "rl.parquet", "What is 2 + 2?"), plain, None)
    inline = Retool(plain).prompt_ids([{"role": "user", "content": "What is 2 + 2?"}])
    assert (found.errors, found.lengths_tokens) == ([], [len(inline)])
    make_task(tmp_path / "task", seed=1, spec=TaskSpec(sft_train=60, sft_val=20, rl_train=30, rl_val=10, eval=20))
    told = lint_file(str(tmp_path / "task" / "sft_train.parquet"), plain, None).errors
    assert len(told) == 1 and "rows like this one cannot be rendered" in told[0]


def test_truths_that_nothing_can_be_compared_with_are_errors(tmp_path):
    path = rl_file(tmp_path / "a.parquet", "What is 1 + 1?", truth="\\frac{")
    (error,) = lint_file(path, None, None).errors
    assert "row 0: no answer can be compared with the ground truth" in error and "it is not an expression" in error
    assert CliRunner().invoke(app, ["lint", path]).exit_code == 1


def test_rows_that_cannot_be_rendered_are_errors(tmp_path, tokenizer):
    path = sft_file(tmp_path / "a.parquet", "What is 1 + 1?", answer="x<|im_end|>")
    (error,) = lint_file(path, tokenizer, None).errors
    assert "row 0: message 1 (assistant): the text contains the control token" in error


def test_a_validation_set_that_is_the_training_set_is_refused(tmp_path):
    problems = [f"What is {n} + {n}?" for n in range(20)]
    train = sft_file(tmp_path / "train.parquet", *problems)
    with pytest.raises(DataError, match=r"20 of the 20 problems of .* are also in .*data.allow_overlap = true"):
        require_disjoint(train, train)
    # By content: another file, another order, other spacing, other answers.
    copy = sft_file(tmp_path / "copy.parquet", *[p.replace(" + ", "+") for p in problems[::-1]], answer="\\boxed{5}")
    with pytest.raises(DataError, match="20 of the 20 problems"):
        require_disjoint(train, copy)
    result = CliRunner().invoke(app, ["lint", train, train])
    assert result.exit_code == 1
    assert "error:" in result.output


def test_a_tenth_of_the_validation_set_may_be_shared(tmp_path):
    problems = [f"What is {n} + {n}?" for n in range(20)]
    train = sft_file(tmp_path / "train.parquet", *problems)
    fresh = [f"What is {n} - {n}?" for n in range(20)]
    require_disjoint(train, sft_file(tmp_path / "two.parquet", *problems[:2], *fresh[:18]))
    with pytest.raises(DataError, match="3 of the 20 problems"):
        require_disjoint(train, sft_file(tmp_path / "three.parquet", *problems[:3], *fresh[:17]))


def test_training_files_are_compared_part_by_part(tmp_path, monkeypatch):
    """More than memory holds: a validation problem is looked for in each part, and counted once."""
    monkeypatch.setattr("retool_mcore.data.lint.INDEX_ROWS", 3)
    problems = [f"What is {n} + {n}?" for n in range(20)]
    (tmp_path / "parts").mkdir()
    sft_file(tmp_path / "parts" / "a.parquet", *problems[:11])
    sft_file(tmp_path / "parts" / "b.parquet", *problems[9:])
    fresh = [f"What is {n} - {n}?" for n in range(20)]
    at_both_ends = [problems[0], problems[10], problems[19]]
    require_disjoint(str(tmp_path / "parts"), sft_file(tmp_path / "two.parquet", *at_both_ends[1:], *fresh[:18]))
    with pytest.raises(
        DataError, match=r"3 of the 20 problems of .*three.* are also in .*parts: .* The first: .*0 \+ 0"
    ):
        require_disjoint(str(tmp_path / "parts"), sft_file(tmp_path / "three.parquet", *at_both_ends, *fresh[:17]))


def test_solved_examples_before_the_problem_are_not_the_problem(tmp_path):
    def few_shot(path, *problems):
        shots = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
        rows = [rl_row(problem, "4", "x", "train", index) for index, problem in enumerate(problems)]
        write_parquet(path, [{**row, "prompt": [*shots, *row["prompt"]]} for row in rows])
        return str(path)

    train = few_shot(tmp_path / "train.parquet", "What is 2 + 2?", "What is 3 + 3?")
    require_disjoint(train, few_shot(tmp_path / "val.parquet", "What is 4 + 4?"))
    with pytest.raises(DataError, match="1 of the 1 problems"):
        require_disjoint(train, few_shot(tmp_path / "same.parquet", "What is 2 + 2?"))


def test_a_missing_file_is_not_looked_for_on_a_hub(tmp_path):
    train = sft_file(tmp_path / "train.parquet", "What is 2 + 2?")
    with pytest.raises(DataError, match="owner/name: cannot be read"):
        require_disjoint(train, "owner/name")


def test_rl_does_not_start_on_its_own_validation_set(tmp_path):
    path = rl_file(tmp_path / "a.parquet", *[f"What is {n} + {n}?" for n in range(12)])
    files = [f"data.train_file={path}", f'validation.files=["{path}"]', f"model.path={tmp_path}/none"]
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", files)
    with pytest.raises(DataError, match="12 of the 12 problems"):
        list(inputs.data(config, all_rows=True, render=False))
    meant = load_config(RlConfig, config.source, [*files, "data.allow_overlap=true"])
    (found,) = inputs.data(meant, all_rows=True, render=False)
    assert "permits training on validation problems" in found.text


def test_a_row_without_an_answer_is_one_finding_beside_the_others(tmp_path: Path):
    rows = [{"problem": "Add 2 and 2 please.", "answer": "4"}, {"problem": "And now?", "answer": None}]
    rows.append({"problem": "Name the next prime after 7.", "answer": "11"})
    path = tmp_path / "plain.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = lint_file(str(path), None, None)
    assert len(found.problems) == 2
    assert len(found.errors) == 1 and "line 2, column answer" in found.errors[0]
    with pytest.raises(DataError, match="line 2, column answer"):
        list(read_problem_rows(str(path)))
