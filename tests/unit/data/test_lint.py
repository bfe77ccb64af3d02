"""`retool data lint`, `split` and `--part`: no problem is in two files, whatever surrounds it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import read_jsonl, read_rows, write_parquet
from retool_mcore.data.leaks import shared_problems
from retool_mcore.data.lint import lint_file, read_problem_rows, require_disjoint
from retool_mcore.data.prompt_format import QUESTION_HEADER, WRAPPERS, unwrap
from retool_mcore.data.rl import rl_row
from retool_mcore.data.split import part_of
from retool_mcore.data.tasks import TaskSpec, make_task
from retool_mcore.errors import DataError
from retool_mcore.preflight import inputs
from retool_mcore.rollout.protocol import Retool
from tests.plain_chatml import with_template
from tests.unit.data.commands import refused, succeed

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests/data/samples/gsm8k_60.jsonl"
SUMS = [f"What is {n} + {n}?" for n in range(20)]
DIFFERENCES = [f"What is {n} - {n}?" for n in range(20)]
TABLE = "A round table seats {} guests, of whom {} are left-handed. How many neighbours can be right-handed?"
BY_NAME = {wrapper.name: wrapper for wrapper in WRAPPERS}


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


def wrapped(name: str, problem: str) -> str:
    wrapper = BY_NAME[name]
    return "\n\n".join([*wrapper.heads[:1], problem, *wrapper.tails[:1]])


# ------------------------------------------------------- findings in one file


def test_the_quickstarts_data_is_clean(tmp_path):
    make_task(tmp_path, seed=1, spec=TaskSpec(sft_train=60, sft_val=20, rl_train=30, rl_val=10, eval=20))
    files = [str(tmp_path / f"{name}.parquet") for name in ("sft_train", "sft_val", "rl_train", "rl_val", "eval")]
    output = succeed("lint", *files, "--model", tmp_path / "model", "--max-tokens", "150").replace("\n", " ")
    assert "error" not in output
    assert "0 rows (0.0%) are over 150 tokens" in output and "of the tokens carry loss" in output
    assert "no files share a problem" in output


def test_repeats_and_lengths_are_counted(tmp_path, tokenizer):
    path = sft_file(tmp_path / "a.parquet", "What is 1 + 1?", "what is  1+1?", "What is 2 + 2?")
    lint = lint_file(path, tokenizer, max_tokens=5)
    assert lint.errors == [] and sum(lint.loss_tokens) < sum(lint.lengths_tokens)
    assert lint.notes[0] == "1 of 3 rows repeat a problem (one occurs 2 times)"
    assert lint.notes[2] == "3 rows (100.0%) are over 5 tokens"


def test_prompts_for_a_model_without_tool_turns_are_measured_inline(tmp_path, tokenizer):
    plain = with_template(tokenizer)
    lint = lint_file(rl_file(tmp_path / "rl.parquet", "What is 2 + 2?"), plain, None)
    inline = Retool(plain).prompt_ids([{"role": "user", "content": "What is 2 + 2?"}])
    assert (lint.errors, lint.lengths_tokens) == ([], [len(inline)])
    make_task(tmp_path / "task", seed=1, spec=TaskSpec(sft_train=60, sft_val=20, rl_train=30, rl_val=10, eval=20))
    (error,) = lint_file(str(tmp_path / "task" / "sft_train.parquet"), plain, None).errors
    assert "rows like this one cannot be rendered" in error


def test_unusable_rows_are_errors(tmp_path, tokenizer):
    path = rl_file(tmp_path / "a.parquet", "What is 1 + 1?", truth="\\frac{")
    (error,) = lint_file(path, None, None).errors
    assert "row 0: no answer can be compared with the ground truth" in error
    assert CliRunner().invoke(app, ["lint", path]).exit_code == 1
    (error,) = lint_file(sft_file(tmp_path / "b.parquet", "1 + 1?", answer="x<|im_end|>"), tokenizer, None).errors
    assert "row 0: message 1 (assistant): the text contains the control token" in error
    rows = [{"problem": "2 + 2?", "answer": "4"}, {"problem": "And now?", "answer": None}]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lint = lint_file(str(tmp_path / "plain.jsonl"), None, None)
    assert len(lint.problems) == 1 and "line 2, column answer" in lint.errors[0]


# ------------------------------------------------------- the same problem in two files


def test_a_validation_set_may_share_at_most_a_tenth_of_its_problems(tmp_path):
    train = sft_file(tmp_path / "train.parquet", *SUMS)
    require_disjoint(train, sft_file(tmp_path / "two.parquet", *SUMS[:2], *DIFFERENCES[:18]))
    with pytest.raises(DataError, match=r"3 of the 20 problems of .* are also in .*data.allow_overlap = true"):
        require_disjoint(train, sft_file(tmp_path / "three.parquet", *SUMS[:3], *DIFFERENCES[:17]))
    copy = sft_file(tmp_path / "copy.parquet", *[text.replace(" + ", "+") for text in SUMS[::-1]], answer="\\boxed{5}")
    with pytest.raises(DataError, match="20 of the 20 problems"):
        require_disjoint(train, copy)
    with pytest.raises(DataError, match="owner/name: cannot be read"):  # training does not search the hub
        require_disjoint(train, "owner/name")
    result = CliRunner().invoke(app, ["lint", train, train])
    assert result.exit_code == 1 and "error:" in result.output


def test_training_files_are_compared_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr("retool_mcore.data.lint.INDEX_ROWS", 3)
    (tmp_path / "parts").mkdir()
    sft_file(tmp_path / "parts" / "a.parquet", *SUMS[:11])
    sft_file(tmp_path / "parts" / "b.parquet", *SUMS[9:])
    shared = [SUMS[0], SUMS[10], SUMS[19]]
    require_disjoint(str(tmp_path / "parts"), sft_file(tmp_path / "two.parquet", *shared[1:], *DIFFERENCES[:18]))
    val = sft_file(tmp_path / "three.parquet", *shared, *DIFFERENCES[:17])
    with pytest.raises(DataError, match=r"3 of the 20 problems of .* The first: .*0 \+ 0"):
        require_disjoint(str(tmp_path / "parts"), val)


def test_rl_does_not_start_with_its_training_file_for_validation(tmp_path):
    path = rl_file(tmp_path / "a.parquet", *SUMS[:12])
    files = [f"data.train_file={path}", f'validation.files=["{path}"]', f"model.path={tmp_path}/none"]
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", files)
    with pytest.raises(DataError, match="12 of the 12 problems"):
        list(inputs.data(config, all_rows=True, render=False))
    allowed = load_config(RlConfig, config.source, [*files, "data.allow_overlap=true"])
    (result,) = inputs.data(allowed, all_rows=True, render=False)
    assert "permits training on validation problems" in result.text


def test_few_shot_examples_are_not_the_problem(tmp_path):
    def few_shot(path, problem):
        shots = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
        row = rl_row(problem, "4", "x", "train", 0)
        write_parquet(path, [{**row, "prompt": [*shots, *row["prompt"]]}])
        return str(path)

    train = few_shot(tmp_path / "train.parquet", "What is 2 + 2?")
    require_disjoint(train, few_shot(tmp_path / "val.parquet", "What is 4 + 4?"))
    with pytest.raises(DataError, match="1 of the 1 problems"):
        require_disjoint(train, few_shot(tmp_path / "same.parquet", "What is 2 + 2?"))


def test_instructions_do_not_hide_a_shared_problem(tmp_path):
    problems = [TABLE.format(2 * n, n) for n in range(10, 60)]
    prompts = [f"You may write code.\n\n{QUESTION_HEADER}\n{wrapped('ReTool-SFT', problem)}" for problem in problems]
    sft = sft_file(tmp_path / "sft.parquet", *prompts)
    rows = [
        {**rl_row("x", "4", "x", "test", 0), "prompt": [{"role": "user", "content": wrapped("DAPO", problem)}]}
        for problem in problems
    ]
    write_parquet(tmp_path / "rl.parquet", rows)
    first, second = ([row.problem for row in read_problem_rows(path)] for path in (sft, str(tmp_path / "rl.parquet")))
    assert len(shared_problems(first, second)) == 50
    with pytest.raises(DataError, match=r"50 of the 50 problems .* The first: 100%: 'A round table"):
        require_disjoint(sft, str(tmp_path / "rl.parquet"))


def test_near_duplicates_are_found_and_other_problems_are_not():
    table = TABLE.format(10, 3)
    near = ["Unknown words first. " + table, table.replace("guests", "people"), "\\(" + table + "\\)"]
    other = [TABLE.format(12, 5), "How many guests sit at 10 round tables with 3 seats each?", "Find 10 + 3."]
    pairs = shared_problems([table], near + other)
    assert {pair.second for pair in pairs} == set(near) and sum(pair.score == 1 for pair in pairs) == 1
    first, second = (f"{table} Each of them plays {n} rounds of cards." for n in (7, 8))
    (pair,) = shared_problems([first], [second, f"Dear reader, hear this. {first}"])
    assert pair.score < 1


def test_an_unknown_instruction_in_many_problems_is_ignored():
    text = "Think about it for as long as you like and then write down the number that you have found at the end. "
    letters = list(map(chr, range(0x3B1, 0x3C9)))
    first = [f"{text} Is the word {letter}a{letter} long?" for letter in letters] * 2
    assert shared_problems(first, [f"{text} Is the word {letter}b{letter} short?" for letter in letters]) == []


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.name)
def test_unwrap_strips_each_known_instruction_at_the_ends_only(wrapper):
    problem = "How many of 7 doors are open?"
    for text in wrapper.heads:
        assert unwrap(f"{text}\n\n{problem}") == (problem, (wrapper.name,))
        assert unwrap(f"{'  '.join(text.split()).upper()} {problem}")[0] == problem
    for text in wrapper.tails:
        assert unwrap(f"{problem} {text}\n") == (problem, (wrapper.name,))
    middle = f"It says: {(wrapper.heads + wrapper.tails)[0]} How long is that text?"
    assert unwrap(middle) == (middle, ())


@given(
    st.text(alphabet="ab 1$\\{}\n.*", max_size=60), st.sampled_from(sorted(BY_NAME)), st.sampled_from(sorted(BY_NAME))
)
def test_unwrap_strips_nested_instructions(problem, inner, outer):
    assert unwrap(wrapped(outer, wrapped(inner, problem)))[0] == problem.strip()


# ------------------------------------------------------- splits and parts


def test_split_holds_out_whole_problems_and_keeps_the_order(tmp_path):
    source = tmp_path / "own.jsonl"
    rows = [{"problem": f"What is {n % 40} + 1?", "answer": str(n % 40 + 1), "row": n} for n in range(120)]
    rows[7]["problem"] = "what  is 7 + 1?"
    source.write_text("\n".join(map(json.dumps, rows)))

    def split(name: str, *options: str) -> list[dict]:
        succeed("split", source, "--hold-out", "20", "--held-out", tmp_path / f"{name}.jsonl", *options)
        return [row for _, row in read_jsonl(tmp_path / f"{name}.jsonl")]

    held_out = split("first")
    train = [row for _, row in read_jsonl(tmp_path / "own.train.jsonl")]
    assert (len(train), len(held_out)) == (99, 21)
    assert not {row["problem"].split()[2] for row in train} & {row["problem"].split()[2] for row in held_out}
    assert [row["row"] for row in train] == sorted(row["row"] for row in train)
    assert split("again") == held_out != split("other", "--seed", "1")


def test_split_keeps_the_columns_of_an_rl_file_and_refuses_to_hold_out_all_rows(tmp_path):
    rl_file(tmp_path / "rl.parquet", *SUMS[:10])
    columns = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    rows = [row for _, row in read_rows(tmp_path / "rl.parquet", columns)]
    assert "leaves none to train on" in refused("split", tmp_path / "rl.parquet", "--hold-out", 10).replace("\n", " ")
    assert len(list(tmp_path.iterdir())) == 1
    succeed("split", tmp_path / "rl.parquet", "--hold-out", "3")
    train, held_out = (
        [row for _, row in read_rows(tmp_path / f"rl.{name}.parquet", columns)] for name in ("train", "held_out")
    )
    assert sorted(train + held_out, key=lambda row: row["extra_info"]["index"]) == rows and len(held_out) == 3


def test_the_parts_of_a_file_are_disjoint(tmp_path):
    problems: dict[str, list[str]] = {}
    for part in ("sft", "rl", "validation"):
        out = str(tmp_path / f"{part}.parquet")
        succeed("rl", SAMPLE, "--out", out, "--part", part, "--sft-share", "0.4")
        problems[part] = lint_file(out, None, None).problems
    assert sum(map(len, problems.values())) == 60
    for first, second in (("sft", "rl"), ("sft", "validation"), ("rl", "validation")):
        assert shared_problems(problems[first], problems[second]) == []
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input": "1+1", "target": "2"}) + "\n")
    output = refused("rl", path, "--out", tmp_path / "o.parquet", "--part", "rl")
    assert "--part reads the text of column question or problem" in " ".join(output.split())


@given(st.text(max_size=80), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_adds_to_the_sft_part(question, first, second):
    low, high = sorted((first, second))
    assert part_of(question, low) != "sft" or part_of(question, high) == "sft"
    assert part_of(f"  {question.upper()} ".lower(), high) == part_of(question.lower(), high)
