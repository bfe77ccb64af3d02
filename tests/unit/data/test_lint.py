"""`retool data lint`, `split` and `--part`: no problem is in two files, whatever surrounds it."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.chat import render
from retool_mcore.data.files import read_jsonl, read_rows, read_source, write_parquet
from retool_mcore.data.leaks import normalised, shared_problems
from retool_mcore.data.lint import FileLint, lint_file, overlap_lines, read_problem_rows, require_disjoint
from retool_mcore.data.prompt_format import QUESTION_HEADER, WRAPPERS, unwrap
from retool_mcore.data.rl import rl_row
from retool_mcore.data.split import part_of, rows_of_part
from retool_mcore.data.tasks import TaskSpec, make_task
from retool_mcore.errors import DataError
from retool_mcore.preflight import inputs
from retool_mcore.rollout.protocol import Hermes, Retool
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


def test_notes_count_repeats_lengths_and_loss(tmp_path, tokenizer):
    problems = [f"What is {'1' * number}?" for number in range(1, 11)]
    problems.append(problems[-1].lower().replace("is", " is"))
    talks = [
        [{"role": "user", "content": problem}, {"role": "assistant", "content": "7" * (1 + at % 2)}]
        for at, problem in enumerate(problems)
    ]
    write_parquet(tmp_path / "a.parquet", [{"messages": talk, "tools": None} for talk in talks])
    rendered = [render(talk, None, tokenizer) for talk in talks]
    tokens, loss = sorted(map(len, rendered)), [sum(row.loss_mask) for row in rendered]
    lint = lint_file(str(tmp_path / "a.parquet"), tokenizer, max_tokens=tokens[8])
    assert lint.errors == []
    assert lint.notes == [
        "1 of 11 rows repeat a problem (one occurs 2 times)",
        f"tokens per row: min {tokens[0]}, 10 % {tokens[1]}, median {tokens[5]}, 90 % {tokens[9]}, 99 % {tokens[10]}, "
        f"max {tokens[10]}; {sum(tokens)} in total",
        f"{sum(each > tokens[8] for each in tokens)} rows (18.2%) are over {tokens[8]} tokens",
        f"{sum(loss) / sum(tokens):.1%} of the tokens carry loss ({min(loss)} in the row with the fewest)",
    ]


def test_prompts_are_measured_as_the_model_gets_them(tmp_path, tokenizer):
    question, plain = "What is 2 + 2?", with_template(tokenizer)
    (tmp_path / "plain.jsonl").write_text(json.dumps({"problem": question, "answer": "4"}))
    inline = Retool(plain).prompt_ids([{"role": "user", "content": question}])
    calling = Hermes(tokenizer).prompt_ids(rl_row(question, "4", "x", "train", 0)["prompt"])
    for path in (rl_file(tmp_path / "rl.parquet", question), str(tmp_path / "plain.jsonl")):
        for model, prompt in ((plain, inline), (tokenizer, calling)):
            lint = lint_file(path, model, None)
            assert (lint.errors, lint.lengths_tokens) == ([], [len(prompt)])
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
    untrained = {"role": "assistant", "content": "2", "weight": 0}
    talk = [{"role": "user", "content": "1 + 1?"}, untrained, {"role": "user", "content": "2 + 2?"}, untrained]
    truths = [{"ground_truth": 4}, {"reward_model": {"ground_truth": "\\frac{"}}, {}]
    (tmp_path / "sft.jsonl").write_text("\n".join(json.dumps({"messages": talk, **truth}) for truth in truths))
    lint = lint_file(str(tmp_path / "sft.jsonl"), tokenizer, None)
    assert lint.problems == ["1 + 1?"] * 3
    number, _, cut, *_ = errors = [error.partition(", ")[2] for error in lint.errors]
    assert number == "line 1: the ground truth is 4, not text" and cut.startswith("line 2: no answer can be compared")
    assert [errors[at] for at in (1, 3, 4)] == [f"line {n}: no token carries loss" for n in (1, 2, 3)]


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


def test_lint_reports_what_two_files_share():
    table, near = TABLE.format(10, 3), f"Dear reader, hear this. {TABLE.format(10, 3)}"
    first = FileLint("a", problems=[*SUMS, table, SUMS[3].lower()])
    assert overlap_lines([first, FileLint("b", problems=[SUMS[3], near, *DIFFERENCES[:18]])]) == (
        [
            "b: 2 of 20 problems are in a: 1 with the same text, 1 nearly the same",
            "  100%: 'What is 3 + 3?' matches 'What is 3 + 3?' in the first file",
            f"  100%: '{near[:70]}...' matches '{table[:70]}...' in the first file",
        ],
        False,
    )
    lines, leaks = overlap_lines([first, FileLint("c", problems=[*SUMS[:5], *DIFFERENCES[:15]])])
    assert leaks and lines[0] == "error: c: 5 of 20 problems are in a: 5 with the same text" and len(lines) == 4
    assert overlap_lines([first, FileLint("d", problems=DIFFERENCES)]) == (["no files share a problem"], False)


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
    other.append(table.partition("left")[0] + "late. In which month does the last of them come home again by train?")
    pairs = shared_problems([table], near + other)
    assert {pair.second for pair in pairs} == set(near) and sum(pair.score == 1 for pair in pairs) == 1
    first, second = (f"{table} Each of them plays {n} rounds of cards." for n in (7, 8))
    (pair,) = shared_problems([first], [second, f"Dear reader, hear this. {first}"])
    assert pair.score < 1
    same = "\\[\\left| X \\right|\\] ＝ $2$, \\leftarrow"  # with a wide sign
    assert normalised(same) == "|x|=2,\\leftarrow"


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
        within = f"{problem} and {text[0].lower()}{text[1:]}"
        assert unwrap(within) == (within, ())
    middle = f"It says: {(wrapper.heads + wrapper.tails)[0]} How long is that text?"
    assert unwrap(middle) == (middle, ())
    assert unwrap(f"{QUESTION_HEADER} a? {QUESTION_HEADER} b?") == ("b?", (QUESTION_HEADER,))


@given(
    st.text(alphabet="ab 1$\\{}\n.*", max_size=60), st.sampled_from(sorted(BY_NAME)), st.sampled_from(sorted(BY_NAME))
)
def test_unwrap_strips_nested_instructions(problem, inner, outer):
    assert unwrap(wrapped(outer, wrapped(inner, problem)))[0] == problem.strip()


# ------------------------------------------------------- splits and parts


def test_split_holds_out_whole_problems_and_keeps_the_order(tmp_path):
    source = tmp_path / "own.jsonl"
    rows = [{"own": f"What is {n % 40} + 1?", "answer": str(n % 40 + 1), "row": n} for n in range(120)]
    rows[7]["own"] = "what  is 7 + 1?"
    source.write_text("\n".join(map(json.dumps, rows)))

    def split(name: str, *options: str) -> list[dict]:
        columns = ("--problem", "own", "--answer", "answer")
        succeed("split", source, "--hold-out", "20", "--held-out", tmp_path / f"{name}.jsonl", *columns, *options)
        return [row for _, row in read_jsonl(tmp_path / f"{name}.jsonl")]

    held_out = split("first")
    train = [row for _, row in read_jsonl(tmp_path / "own.train.jsonl")]
    assert (len(train), len(held_out)) == (99, 21)
    assert not {row["own"].split()[2] for row in train} & {row["own"].split()[2] for row in held_out}
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
    questions = [row["question"] for _, row in read_source(str(SAMPLE))]
    assert {part: len(each) for part, each in problems.items()} == Counter(part_of(text, 0.4) for text in questions)
    for first, second in (("sft", "rl"), ("sft", "validation"), ("rl", "validation")):
        assert shared_problems(problems[first], problems[second]) == []
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input": "1+1", "target": "2"}) + "\n")
    output = refused("rl", path, "--out", tmp_path / "o.parquet", "--part", "rl")
    assert "--part reads the text of column question or problem" in " ".join(output.split())


def test_the_part_of_a_problem_never_changes_and_a_variant_is_in_its_originals():
    # Another division would put problems of existing files into other parts.
    parts = Counter(part_of(f"What is {n} + 1?", 0.4) for n in range(1000))
    assert parts == {"sft": 415, "validation": 23, "rl": 562}
    assert all(part_of(f" what is {n}+1?", 0.4) == part_of(f"What is {n} + 1?", 0.4) for n in range(20))
    for variant, original in zip(DIFFERENCES, SUMS, strict=True):
        row = ("here", {"question": variant, "original_question": original})
        assert list(rows_of_part([row], part_of(original))) == [row]
