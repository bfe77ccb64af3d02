"""`retool data lint`, `split` and `--part`: no problem is in two files, whatever surrounds it."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.chat import render
from retool_mcore.data.files import read_jsonl, write_parquet
from retool_mcore.data.leaks import normalised, shared_problems
from retool_mcore.data.lint import FileLint, lint_file, overlap_lines, require_disjoint
from retool_mcore.data.prompt_format import QUESTION_HEADER, WRAPPERS, unwrap
from retool_mcore.data.rl import rl_row
from retool_mcore.data.split import part_of, rows_of_part
from retool_mcore.errors import DataError
from retool_mcore.rollout.protocol import Hermes, Retool
from tests.plain_chatml import with_template
from tests.unit.data.commands import refused, succeed

SUMS = [f"What is {n} + {n}?" for n in range(20)]
DIFFERENCES = [f"What is {n} - {n}?" for n in range(20)]
TABLE = "A round table seats {} guests, of whom {} are left-handed. How many neighbours can be right-handed?"
BY_NAME = {wrapper.name: wrapper for wrapper in WRAPPERS}


def rl_file(path, *problems, truth="4"):
    write_parquet(path, [rl_row(problem, truth, "x", "train", index) for index, problem in enumerate(problems)])
    return str(path)


def talk(problem: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]


def sft_file(path, *problems, answer="\\boxed{4}"):
    write_parquet(path, [{"messages": talk(problem, answer), "tools": None} for problem in problems])
    return str(path)


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def wrapped(name: str, problem: str) -> str:
    wrapper = BY_NAME[name]
    return "\n\n".join([*wrapper.heads[:1], problem, *wrapper.tails[:1]])


def test_notes_count_repeats_lengths_and_loss(tmp_path, tokenizer):
    problems = [f"What is {'1' * number}?" for number in range(1, 11)]
    problems.append(problems[-1].lower().replace("is", " is"))
    talks = [talk(problem, "7" * (1 + at % 2)) for at, problem in enumerate(problems)]
    path = jsonl(tmp_path / "a.jsonl", [{"messages": each} for each in talks])
    rendered = [render(each, None, tokenizer) for each in talks]
    tokens, loss = sorted(map(len, rendered)), [sum(row.loss_mask) for row in rendered]
    lint = lint_file(path, tokenizer, max_tokens=tokens[8])
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
    inline = Retool(plain).prompt_ids([{"role": "user", "content": question}])
    calling = Hermes(tokenizer).prompt_ids(rl_row(question, "4", "x", "train", 0)["prompt"])
    bare = jsonl(tmp_path / "plain.jsonl", [{"problem": question, "answer": "4"}])
    for path in (rl_file(tmp_path / "rl.parquet", question), bare):
        for model, prompt in ((plain, inline), (tokenizer, calling)):
            lint = lint_file(path, model, None)
            assert (lint.errors, lint.lengths_tokens) == ([], [len(prompt)])


LINTED = [case for _, case in read_jsonl(Path(__file__).with_name("linted.jsonl"))]


@pytest.mark.parametrize("case", LINTED, ids=lambda case: case["errors"][0])
def test_an_unusable_row_is_an_error(tmp_path, tokenizer, case):
    path = jsonl(tmp_path / "a.jsonl", [{"problem": "2 + 2?", "answer": "4"}, case["row"]])
    lint = lint_file(path, tokenizer, None)
    assert lint.problems[:1] == ["2 + 2?"] and lint.problems[1:] in ([], ["1 + 1?"])
    assert len(lint.errors) == len(case["errors"])
    for found, wanted in zip(lint.errors, case["errors"], strict=True):
        assert found.startswith(f"{path}, {wanted}")


def test_an_error_is_the_commands_exit_code(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [LINTED[0]["row"]])
    assert CliRunner().invoke(app, ["lint", path]).exit_code == 1


def test_a_validation_set_may_share_at_most_a_tenth_of_its_problems(tmp_path, monkeypatch):
    monkeypatch.setattr("retool_mcore.data.lint.INDEX_ROWS", 3)  # training problems are compared part by part
    parts = tmp_path / "parts"
    parts.mkdir()
    sft_file(parts / "a.parquet", *SUMS[:11])
    sft_file(parts / "b.parquet", *SUMS[9:])
    shared = [SUMS[0], SUMS[10], SUMS[19]]
    require_disjoint(str(parts), sft_file(tmp_path / "two.parquet", *shared[1:], *DIFFERENCES[:18]))
    val = sft_file(tmp_path / "three.parquet", *shared, *DIFFERENCES[:17])
    with pytest.raises(DataError, match=r"3 of the 20 .* data.allow_overlap = true .* The first: .*0 \+ 0"):
        require_disjoint(str(parts), val)
    copy = sft_file(tmp_path / "copy.parquet", *[text.replace(" + ", "+") for text in SUMS[::-1]], answer="5")
    with pytest.raises(DataError, match="20 of the 20 problems"):
        require_disjoint(str(parts), copy)


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
    assert leaks and lines[0] == "error: c: 5 of 20 problems are in a: 5 with the same text"


def test_instructions_do_not_hide_a_shared_problem(tmp_path):
    problems = [TABLE.format(2 * n, n) for n in range(10, 20)]
    prompts = [f"You may write code.\n\n{QUESTION_HEADER}\n{wrapped('ReTool-SFT', problem)}" for problem in problems]
    sft = sft_file(tmp_path / "sft.parquet", *prompts)
    rl = rl_file(tmp_path / "rl.parquet", *(wrapped("DAPO", problem) for problem in problems))
    with pytest.raises(DataError, match=r"10 of the 10 problems .* The first: 100%: 'A round table"):
        require_disjoint(sft, rl)


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


NAMES = st.sampled_from(sorted(BY_NAME))


@given(st.text(alphabet="ab 1$\\{}\n.*", max_size=60), NAMES, NAMES)
def test_unwrap_strips_nested_instructions(problem, inner, outer):
    assert unwrap(wrapped(outer, wrapped(inner, problem)))[0] == problem.strip()


def test_split_holds_out_whole_problems_and_keeps_the_order(tmp_path):
    rows = [{"own": f"What is {n % 40} + 1?", "answer": str(n % 40 + 1), "row": n} for n in range(120)]
    rows[7]["own"] = "what  is 7 + 1?"
    source = jsonl(tmp_path / "own.jsonl", rows)
    columns = ("--problem", "own", "--answer", "answer")
    refusal = refused("split", source, "--hold-out", 120, *columns)
    assert "leaves none to train on" in refusal.replace("\n", " ") and len(list(tmp_path.iterdir())) == 1

    def split(name: str, *options: str) -> list[dict]:
        succeed("split", source, "--hold-out", "20", "--held-out", tmp_path / f"{name}.jsonl", *columns, *options)
        return [row for _, row in read_jsonl(tmp_path / f"{name}.jsonl")]

    held_out = split("first")
    train = [row for _, row in read_jsonl(tmp_path / "own.train.jsonl")]
    assert (len(train), len(held_out)) == (99, 21)
    assert not {row["own"].split()[2] for row in train} & {row["own"].split()[2] for row in held_out}
    assert [row["row"] for row in train] == sorted(row["row"] for row in train)
    assert split("again") == held_out != split("other", "--seed", "1")


def test_the_part_of_a_problem_never_changes_and_a_variant_is_in_its_originals(tmp_path):
    # Another division would put problems of existing files into other parts.
    parts = Counter(part_of(f"What is {n} + 1?", 0.4) for n in range(1000))
    assert parts == {"sft": 415, "validation": 23, "rl": 562}
    assert all(part_of(f" what is {n}+1?", 0.4) == part_of(f"What is {n} + 1?", 0.4) for n in range(20))
    for variant, original in zip(DIFFERENCES, SUMS, strict=True):
        row = ("here", {"question": variant, "original_question": original})
        assert list(rows_of_part([row], part_of(original))) == [row]
    sample = Path(__file__).parents[2] / "data/samples/gsm8k_60.jsonl"
    succeed("rl", sample, "--out", tmp_path / "out.parquet", "--part", "sft", "--sft-share", "1")
    assert len(lint_file(str(tmp_path / "out.parquet"), None, None).problems) == 60
    with pytest.raises(DataError, match="--part reads the text of column question or problem"):
        list(rows_of_part([("here", {"input": "1+1", "target": "2"})], "rl"))
    own = [("here", {"body": "What is", "task": f"{n} + 1?"}) for n in range(20)]
    parts_of_own = [
        list(rows_of_part([row], part_of(f"What is {row[1]['task']}"), columns=("body", "task"))) for row in own
    ]
    assert parts_of_own == [[row] for row in own]
