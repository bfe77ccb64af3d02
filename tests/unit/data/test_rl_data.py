"""`retool data rl`: reads each format and layout, and writes each problem once in verl's schema."""

import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.files import read_jsonl, read_rows, read_source, source_files, write_parquet
from retool_mcore.data.layouts import Columns, read_problem
from retool_mcore.data.lint import read_problem_rows
from retool_mcore.data.prompt_format import hermes_prompt
from retool_mcore.data.rl import convert_rl, name_and_split, rl_row
from retool_mcore.data.rl_prompts import normalised_prompt
from retool_mcore.data.tasks import make_task
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from tests.unit.data.commands import refused, succeed

CASES = [case for _, case in read_jsonl(Path(__file__).with_name("layouts.jsonl"))]
LAYOUTS = {case["name"]: case for case in CASES if "name" in case}
BOXED = "We add and get $\\boxed{\\frac{1}{2}}$."
ROWS = [{"problem": "How many primes are below 30?", "answer": "10"}, {"problem": "2 + 2?", "answer": "4"}]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def invoke(tmp_path, *rows, options=(), name="in.jsonl") -> str:
    """The output of the command for a file with these rows."""
    source = jsonl(tmp_path / name, *rows)
    result = CliRunner().invoke(app, ["rl", str(source), "--out", str(tmp_path / "out.parquet"), *options])
    return result.output.replace("\n", " ")


def written(tmp_path, column: str) -> list:
    return [row[column] for _, row in read_rows(tmp_path / "out.parquet", (column,))]


LINES = "\n\n".join(map(json.dumps, ROWS))
FILES = {
    "own.csv": '\ufeffproblem,answer\n"How many primes are below 30?",10\n2 + 2?,4\n'.encode(),
    "own.jsonl.gz": gzip.compress(LINES.encode()),
    "own.json": json.dumps(ROWS, indent=2).encode(),
    "lines.json": LINES.encode(),
}


def save_to_disk(folder: Path) -> None:
    """A folder of `save_to_disk`, with a file in which `datasets` caches the result of `map`."""
    from datasets import Dataset, load_from_disk

    Dataset.from_list(ROWS).save_to_disk(folder)
    load_from_disk(folder).map(lambda row: {"problem": f"{row['problem']} Say it in Greek."})
    assert list(folder.glob("cache-*.arrow"))


@pytest.mark.parametrize("name", [*FILES, "saved"])
def test_each_format_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name]) if name in FILES else save_to_disk(path)
    succeed("rl", path, "--out", tmp_path / "out.parquet")
    assert [each["ground_truth"] for each in written(tmp_path, "reward_model")] == ["10", "4"]
    if path.is_file():
        assert [problem.truth for problem in read_problems([path])] == ["10", "4"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("cut.jsonl.gz", FILES["own.jsonl.gz"][:-12], "cannot be read"),
        ("long.csv", b"problem,answer\nHow many?,1,2\n", "row 0: the number of fields differs"),
        ("short.csv", b"problem,answer\nHow many?\n", "row 0: the number of fields differs"),
        ("empty.jsonl", b"", "no rows"),
    ],
)
def test_an_incomplete_file_is_one_error(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*{why}"):
        list(read_source(str(tmp_path / name)))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "b-part2.json").write_text(json.dumps(ROWS[1], indent=2))  # one object over several lines
    jsonl(tmp_path / "c.jsonl", ROWS[0])
    jsonl(tmp_path / "a.jsonl", ROWS[0])
    rows = list(read_source(str(tmp_path)))
    places = ("a.jsonl, line 1", "b-part2.json, row 0", "c.jsonl, line 1")
    wanted = zip(places, (ROWS[0], ROWS[1], ROWS[0]), strict=True)
    assert rows == [(f"{tmp_path}/{place}", row) for place, row in wanted]
    assert list(read_source(str(tmp_path), limit=2)) == rows[:2]
    assert list(read_source(str(tmp_path), split="part2")) == rows[1:2]
    with pytest.raises(DataError, match="no data file of split 'train'"):
        source_files(str(tmp_path), "train")


BAD_LINES = [
    b'{"problem": "P?"}',
    b'{"problem": "P?", "answer": ["4", "5"]}',
    b'{"problem": 5, "answer": "4"}',
    b'{"problem": "\xff", "answer": "4"}',
    b'{"problem": "\\ud800", "answer": "4"}',
    b'{"problem": "P?", "answer": ' + b"9" * 5000 + b"}",
    b'{"problem": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[1, 2]",
    b'{"problem": "P',
]


def test_bad_lines_stop_the_command_or_are_rejected(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_bytes(b"\n".join([b'{"problem": "Q?", "answer": "1"}', b"", *BAD_LINES]))
    assert refused("rl", source, "--out", out).startswith(f"error: {source}, line 3") and not out.exists()
    output = succeed("rl", source, "--out", out, "--reject-bad")
    assert f"{len(BAD_LINES) + 1} rows\n1 after source ({len(BAD_LINES)} rejected)" in output
    rejects = {row["where"] for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")}
    assert rejects == {f"{source}, line {n}" for n in range(3, len(BAD_LINES) + 3)}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_public_layouts_need_no_options(case):
    assert read_problem(case["row"], "here") == (case["problem"], case["truth"])


@pytest.mark.parametrize("case", [case for case in CASES if "refused" in case], ids=lambda case: case["refused"])
def test_an_unusable_row_is_an_error_that_names_the_column(case):
    with pytest.raises(DataError, match=re.escape(case["refused"])):
        read_problem(case["row"], "here")


def test_options_name_the_columns(tmp_path):
    row = {"aufgabe": "P?", "zusatz": "Q?", "loesung": BOXED, "wert": "7"}
    assert "columns aufgabe, zusatz, loesung, wert;" in invoke(tmp_path, row)
    for options, truth in ((("--answer", "wert"), "7"), (("--solution-box", "loesung"), "\\frac{1}{2}")):
        invoke(tmp_path, row, options=("--problem", "aufgabe", "--problem", "zusatz", *options))
        assert [each["ground_truth"] for each in written(tmp_path, "reward_model")] == [truth]
        assert written(tmp_path, "prompt")[0][0]["content"].startswith("P?\nQ?\n")
    assert "Use --problem together with one of" in invoke(tmp_path, row, options=("--answer", "wert"))
    assert "expected aufgabe/x" in invoke(tmp_path, row, options=("--problem", "aufgabe", "--answer", "x"))
    (problem,) = read_problems([tmp_path / "in.jsonl"], columns=Columns(("aufgabe",), "loesung", box=True))
    assert (problem.messages[0]["content"], problem.truth) == (hermes_prompt("P?"), "\\frac{1}{2}")
    choice = {"question": "Which?", "options": ["1", "2"], "answer": "A"}
    assert read_problem(choice, "here", Columns(("question",), "answer")) == ("Which?", "A")


def test_lint_uses_the_named_columns_in_the_files_that_have_them(tmp_path):
    own = jsonl(tmp_path / "own.jsonl", {"aufgabe": "P?", "wert": "1", "messages": [{"role": "user", "content": "Q?"}]})
    rl = jsonl(tmp_path / "rl.jsonl", rl_row("P?", "1", "x", "test", 0))
    result = CliRunner().invoke(app, ["lint", str(own), str(rl), "--problem", "aufgabe", "--answer", "wert"])
    assert result.exit_code == 1
    assert f"{rl}: 1 of 1 problems are in {own}: 1 with the same text" in result.output
    assert [row.problem for row in read_problem_rows(str(own))] == ["Q?"]


def test_a_prompt_as_json_text_is_read_as_its_turns(tmp_path):
    said = {"system": "Be brief.", "user": "1 + 1?", "assistant": "2"}
    turns = [{"role": role, "content": text} for role, text in (*said.items(), ("user", "2 + 2?"))]
    row = {**rl_row("x", "4", "own", "train", 0), "prompt": json.dumps(turns)}
    output = invoke(tmp_path, row)
    for role in said:
        assert f"rows whose {role} turns are dropped (RL on a file in verl's schema keeps them): 1" in output
    made = [{"role": "user", "content": "2 + 2?\nPut your final answer within \\boxed{}."}]
    assert written(tmp_path, "prompt") == [made]
    assert normalised_prompt(row["prompt"])[0] == turns
    assert read_problems([tmp_path / "in.jsonl"])[0].messages == turns


def test_rows_have_verls_schema():
    row = LAYOUTS["DAPO"]["row"]
    assert convert_rl([("here", row), ("there", {"problem": "3 + 4?", "answer": b"7"})], "math_dapo").rows == [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{problem}\nPut your final answer within \\boxed{{}}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (problem, truth) in enumerate((("What is $2 + 2$?", "4"), ("3 + 4?", "7")))
    ]


def test_repeats_are_dropped_and_counted_and_conflicts_are_named(tmp_path):
    first = {"problem": "What is 2 + 2?", "answer": "4"}
    rows = [*[first] * 100, {"problem": "what  is 2+2?", "answer": "4"}, {"problem": "2 - 2?", "answer": "0"}]
    output = invoke(tmp_path, *rows, {**first, "answer": "5"}, {"problem": "Why?", "answer": "\\frac{"})
    assert "104 rows" in output and "2 after repeat (101 rejected) 50.00% survived" in output
    source = tmp_path / "in.jsonl"
    assert f"the first row is kept ({source}, line 103): 1" in output
    assert written(tmp_path, "extra_info") == [{"index": 0, "split": "train"}, {"index": 1, "split": "train"}]
    conflict, unreadable = (row for _, row in read_jsonl(tmp_path / "out.rejects.jsonl"))
    why = "an earlier row has the same problem with a different answer"
    texts = {"problem": "What is 2 + 2?", "truth": "5"}
    assert conflict == {"where": f"{source}, line 103", "stage": "repeat", "reason": why, **texts}
    assert (unreadable["where"], unreadable["stage"]) == (f"{source}, line 104", "answer")


def test_truths_that_cannot_be_judged_are_rejected_with_the_reason(tmp_path):
    bad = ({"question": "Show it.", "final_answer": None}, {"problem": "Where?", "answer": "notfound"})
    assert "1 after answer (2 rejected)" in invoke(tmp_path, ROWS[0], *bad)
    reasons = [row["reason"] for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")]
    assert "the answer is a proof" in reasons[0] and reasons[1] == "'notfound' is not an answer"
    output = invoke(tmp_path, {"problem": "Why?", "answer": None})
    assert f"none of 1 rows survived; the first: {tmp_path / 'in.jsonl'}, line 1, column" in output


def test_too_long_prompts_are_dropped_and_counted_as_the_model_sees_them(tmp_path):
    make_task(tmp_path / "task")
    long = {"problem": "Add " + " ".join(map(str, range(400))) + ".", "answer": "79800"}
    model = ("--model", str(tmp_path / "task" / "model"))
    output = invoke(tmp_path, *ROWS, long, options=("--max-prompt-tokens", "400", *model))
    assert "2 after length (1 rejected)" in output
    ((_, reject),) = read_jsonl(tmp_path / "out.rejects.jsonl")
    assert reject["stage"] == "length" and int(reject["reason"].split()[3]) > 400
    assert "Raise --max-prompt-tokens" in invoke(tmp_path, long, options=("--max-prompt-tokens", "400", *model))
    assert "needs --model" in invoke(tmp_path, *ROWS, options=("--max-prompt-tokens", "5"))


def test_the_split_comes_from_the_row_or_the_file_and_several_need_a_choice(tmp_path):
    for name, split in (("train_test.jsonl", "test"), ("train-0-of-1.jsonl", "train"), ("latest.jsonl", "train")):
        invoke(tmp_path, ROWS[0], name=name)
        assert written(tmp_path, "extra_info")[0]["split"] == split
    rows = [("here", rl_row("P?", "1", "x", "test", 0)), ("here", rl_row("Q?", "1", "x", "train", 0))]
    assert convert_rl(rows[:1], "x", "train").rows[0]["extra_info"]["split"] == "test"
    with pytest.raises(DataError, match=r"a row of split 'train' after rows of 'test'. Choose one with --split"):
        convert_rl(rows, "x")
    (kept,) = convert_rl(rows, "x", "train", wanted="train").rows
    assert kept["prompt"][0]["content"].startswith("Q?")
    with pytest.raises(DataError, match=r"no row can be used \(1 rejected by split\). Choose another split"):
        convert_rl(rows[:1], "x", "train", wanted="train")


def test_a_folder_with_several_splits_needs_a_choice(tmp_path):
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "test.jsonl", ROWS[1])
    write_parquet(tmp_path / "set" / "train.parquet", ROWS)
    output = refused("rl", tmp_path / "set", "--out", tmp_path / "out.parquet")
    assert "several splits: test.jsonl (test), train.parquet (train). Choose one with --split" in output
    succeed("rl", tmp_path / "set", "--out", tmp_path / "out.parquet", "--split", "test", "--name", "mine")
    assert written(tmp_path, "data_source") == ["mine"]
    assert written(tmp_path, "extra_info") == [{"index": 0, "split": "test"}]
    for source in ("sets/gsm8k/test.jsonl.gz", "openai/gsm8k"):
        assert name_and_split(source)[0] == "gsm8k"
