"""What lint finds, and that training on its own validation set is refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from retool_mcore.data.cli import app
from retool_mcore.data.files import write_parquet
from retool_mcore.data.lint import lint_file, ngrams, overlap, read_problem_rows, require_disjoint
from retool_mcore.data.rl import rl_row
from retool_mcore.data.tasks import TaskSpec, make_task
from retool_mcore.errors import DataError

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
    result = CliRunner().invoke(app, ["lint", *files, "--model", str(tmp_path / "model"), "--max-tokens", "150"])
    assert result.exit_code == 0, result.output
    output = result.output.replace("\n", " ")
    assert "error" not in output
    assert "0 rows (0.0%) are over 150 tokens" in output
    assert "of the tokens carry loss" in output
    assert output.count("are also in") == 10


def test_repeats_and_lengths_are_told(tmp_path, tokenizer):
    path = sft_file(tmp_path / "a.parquet", "What is 1 + 1?", "what is  1+1?", "What is 2 + 2?")
    found = lint_file(path, tokenizer, max_tokens=5)
    assert found.errors == []
    assert found.notes[0] == "1 of 3 rows repeat a problem (one of them 2 times)"
    assert found.notes[1].startswith("tokens a row: min ")
    assert found.notes[2] == "3 rows (100.0%) are over 5 tokens"
    assert sum(found.loss_tokens) < sum(found.lengths_tokens)
    assert found.notes[3].endswith(f"({min(found.loss_tokens)} in the row with the fewest)")


def test_truths_that_nothing_can_be_compared_with_are_errors(tmp_path):
    path = rl_file(tmp_path / "a.parquet", "What is 1 + 1?", truth="\\frac{")
    (error,) = lint_file(path, None, None).errors
    assert "row 0: nothing can be compared with the ground truth" in error
    assert CliRunner().invoke(app, ["lint", path]).exit_code == 1


def test_rows_that_cannot_be_rendered_are_errors(tmp_path, tokenizer):
    path = sft_file(tmp_path / "a.parquet", "What is 1 + 1?", answer="x<|im_end|>")
    (error,) = lint_file(path, tokenizer, None).errors
    assert "row 0: message 1 (assistant): the text contains the control token" in error


def test_overlap_is_found_by_text_and_by_thirteen_words():
    found = overlap(["What is 2 + 2?", LONG], ["what is 2+2 ?", f"Suppose: {LONG} Prove it.", "Else?"], ("a", "b"))
    assert (found.same, found.ngram, found.total) == (1, 2, 3)
    assert ngrams("one two") != ngrams("two one")
    assert len(ngrams(LONG)) == len(LONG.split()) - 12


def test_a_validation_set_that_is_the_training_set_is_refused(tmp_path):
    problems = [f"What is {n} + {n}?" for n in range(20)]
    train = sft_file(tmp_path / "train.parquet", *problems)
    with pytest.raises(DataError, match="of 20 problems 20 are also in"):
        require_disjoint(train, train)
    other = sft_file(tmp_path / "val.parquet", problems[0], *[f"What is {n} - {n}?" for n in range(19)])
    assert require_disjoint(train, other).same == 1
    result = CliRunner().invoke(app, ["lint", train, train])
    assert result.exit_code == 1
    assert "error:" in result.output


def test_the_same_problem_counts_across_sft_and_rl_files(tmp_path):
    train = sft_file(tmp_path / "train.parquet", "What is 2 + 2?")
    val = rl_file(tmp_path / "val.parquet", "What is 2 + 2?")
    with pytest.raises(DataError, match="1 are also in"):
        require_disjoint(train, val)


def test_files_of_no_known_schema_are_errors(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"text": "x"}])
    with pytest.raises(DataError, match="row 0: neither a column messages"):
        list(read_problem_rows(str(tmp_path / "a.parquet")))
    write_parquet(tmp_path / "b.parquet", [{"prompt": [{"role": "system", "content": "x"}]}])
    with pytest.raises(DataError, match="row 0: no user turn with text"):
        list(read_problem_rows(str(tmp_path / "b.parquet")))
