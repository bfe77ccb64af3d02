"""Public layouts by their columns, columns by option, and splits that stay apart."""

import json

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.files import read_jsonl, read_rows, write_parquet
from retool_mcore.data.layouts import Columns, NoTruth, read_problem
from retool_mcore.data.lint import lint_file, read_problem_rows
from retool_mcore.data.prompt_format import hermes_prompt
from retool_mcore.data.rl import convert_rl, rl_row
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from tests.unit.data.commands import refused, succeed

BOXED = "We add and get $\\boxed{\\frac{1}{2}}$."
ROWS = {
    "MATH": ({"problem": "P?", "level": "Level 1", "type": "Algebra", "solution": BOXED}, "P?", "\\frac{1}{2}"),
    "MATH, a step in a box": ({"problem": "P?", "solution": "From $\\boxed{7}$: $\\boxed{8}$."}, "P?", "8"),
    "NuminaMath-CoT": ({"source": "x", "problem": "P?", "solution": BOXED, "messages": []}, "P?", "\\frac{1}{2}"),
    "NuminaMath-1.5": ({"problem": "P?", "solution": "So 3.", "answer": "3", "source": "x"}, "P?", "3"),
    "DAPO-Processed": ({"prompt": "P?", "solution": "34", "reward_model": {"ground_truth": "34"}}, "P?", "34"),
    "Big-Math": ({"problem": "P?", "answer": "5", "source": "x", "llama8b_solve_rate": 0.5}, "P?", "5"),
    "Big-Math-Processed": ({"prompt": "P?", "solution": "5", "source": "x"}, "P?", "5"),
    "SVAMP": ({"Body": "B.", "Question": "Q?", "Equation": "( 8 - 3 )", "Answer": 5.0}, "B.\nQ?", "5"),
    "ASDiv": ({"body": "B.", "question": "Q?", "answer": "9 (apples)", "formula": "7+2=9"}, "B.\nQ?", "9"),
    "MAWPS": ({"Question": "N_00 and N_01 ?", "Numbers": "3.0 4.5", "Answer": 7.5}, "3 and 4.5 ?", "7.5"),
    "Calc-MAWPS": ({"question": "Q?", "chain": "<x>", "result": "7", "result_float": 7.0}, "Q?", "7"),
    "OlympiadBench": ({"question": "Q?", "context": None, "final_answer": ["2"], "unit": None}, "Q?", "2"),
    "DAPO of slime": ({"prompt": [{"role": "user", "content": "P?"}], "label": "34"}, "P?", "34"),
    "verl": ({"prompt": [{"role": "user", "content": "P?"}], "reward_model": {"ground_truth": "4"}}, "P?", "4"),
    "CARP": ({"content": "C?", "answer": "$x=1$"}, "C?", "$x=1$"),
}


@pytest.mark.parametrize("name", ROWS)
def test_public_layouts_are_read_by_themselves(name):
    row, problem, truth = ROWS[name]
    assert read_problem(row, "here") == (problem, truth)


@pytest.mark.parametrize("name", ["MATH", "DAPO-Processed", "SVAMP", "verl"])
def test_an_evaluation_and_lint_read_the_same_layouts(tmp_path, name):
    row, problem, truth = ROWS[name]
    path = tmp_path / "in.parquet"
    write_parquet(path, [row])
    (read,) = read_problems([path])
    of_turns = isinstance(row.get("prompt"), list)
    assert read.messages == [{"role": "user", "content": problem if of_turns else hermes_prompt(problem)}]
    assert read.truth == truth
    assert [each.problem for each in read_problem_rows(str(path))] == [problem]
    assert lint_file(str(path), None, None).errors == []


def test_named_columns_hold_for_an_evaluation(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"problem": "Not this.", "answer": "0", "aufgabe": "P?", "loesung": BOXED}))
    (read,) = read_problems([path], columns=Columns(("aufgabe",), "loesung", box=True))
    assert (read.messages[0]["content"], read.truth) == (hermes_prompt("P?"), "\\frac{1}{2}")
    with pytest.raises(
        DataError, match=r"line 1: columns problem, answer, aufgabe, loesung; not frage/loesung\. The row"
    ):
        read_problems([path], columns=Columns(("frage",), "loesung"))


def test_lint_reads_named_columns_where_they_are(tmp_path):
    rows = {"a": {"aufgabe": "P?", "wert": "1"}, "b": rl_row("P?", "1", "x", "test", 0)}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    files = [str(tmp_path / f"{name}.jsonl") for name in rows]
    output = refused("lint", *files)
    assert "The row: aufgabe = 'P?', wert = '1'. Name the columns" in output
    named = CliRunner().invoke(app, ["lint", *files, "--problem", "aufgabe", "--answer", "wert"])
    assert named.exit_code == 1, named.output
    assert f"{files[1]}: of 1 problems, {files[0]} has 1 with the same text" in named.output
    output = refused("lint", *files, "--problem", "aufgabe", "--answer", "wort")
    assert "columns aufgabe, wert; not aufgabe/wort" in output
    output = refused("lint", *files, "--answer", "wert")
    assert "Use --problem together with one of" in output


def test_lint_reads_problems_beside_messages_when_they_are_named(tmp_path):
    said = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": BOXED}]
    path = tmp_path / "numina.jsonl"
    path.write_text(json.dumps({"problem": "P?", "solution": BOXED, "messages": said}))
    assert [row.problem for row in read_problem_rows(str(path))] == ["Q?"]
    (row,) = read_problem_rows(str(path), columns=Columns(("problem",), "solution", box=True))
    assert (row.problem, row.truth, row.is_sft) == ("P?", "\\frac{1}{2}", False)


def invoke(tmp_path, *rows, options=(), name="in.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CliRunner().invoke(app, ["rl", str(tmp_path / name), "--out", str(tmp_path / "out.parquet"), *options])


def test_columns_are_named_by_options(tmp_path):
    row = {"aufgabe": "P?", "zusatz": "Q?", "loesung": BOXED, "wert": "7"}
    refused = invoke(tmp_path, row)
    assert refused.exit_code == 2
    assert "columns aufgabe, zusatz, loesung, wert;" in refused.output
    assert "--problem, and --answer, or --solution-box" in refused.output
    for options, truth in ((("--answer", "wert"), "7"), (("--solution-box", "loesung"), "\\frac{1}{2}")):
        result = invoke(tmp_path, row, options=("--problem", "aufgabe", "--problem", "zusatz", *options))
        assert result.exit_code == 0, result.output
        ((_, made),) = read_rows(tmp_path / "out.parquet", ("prompt", "reward_model"))
        assert made["reward_model"]["ground_truth"] == truth
        assert made["prompt"][0]["content"].startswith("P?\nQ?\n")
    assert invoke(tmp_path, row, options=("--answer", "wert")).exit_code == 2
    assert "not aufgabe/x" in invoke(tmp_path, row, options=("--problem", "aufgabe", "--answer", "x")).output


def test_truths_that_cannot_be_judged_are_rejected_with_a_reason(tmp_path):
    proof = {"question": "Show it.", "final_answer": None}
    several = {"question": "Which?", "final_answer": ["1", "2"]}
    told = {"problem": "Why?", "answer": "proof"}
    lost = {"problem": "Where?", "answer": "notfound"}
    boxless = {"problem": "How?", "solution": "Thus."}
    result = invoke(tmp_path, {"problem": "P?", "answer": "1"}, proof, several, told, lost, boxless)
    assert result.exit_code == 0, result.output
    assert "1 after answer (5 rejected)" in result.output
    why = [row["reason"] for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")]
    reasons = (
        "the answer is a proof",
        "2 answers",
        "'proof' is not an answer",
        "'notfound' is not an answer",
        "no \\boxed{}",
    )
    for reason, found in zip(reasons, why, strict=True):
        assert reason in found


def test_test_rows_are_never_marked_as_train(tmp_path):
    for name, split in (("gsm_test.jsonl", "test"), ("train-00000-of-00001.jsonl", "train"), ("latest.jsonl", "train")):
        assert invoke(tmp_path, {"problem": "P?", "answer": "1"}, name=name).exit_code == 0
        ((_, row),) = read_rows(tmp_path / "out.parquet", ("extra_info",))
        assert row["extra_info"]["split"] == split
    rows = [rl_row("P?", "1", "x", "test", 0), rl_row("Q?", "1", "x", "train", 0)]
    named = [("here", row) for row in rows]
    with pytest.raises(DataError, match=r"a row of split 'train' after rows of 'test'. Choose one with --split"):
        convert_rl(named, "x")
    (kept,) = convert_rl(named, "x", "train", wanted="train").rows
    assert kept["prompt"][0]["content"].startswith("Q?")
    assert [row["extra_info"]["split"] for row in convert_rl(named[:1], "x", "train").rows] == ["test"]


@pytest.mark.parametrize("name", ["options", "choices"])
def test_a_choice_that_the_problem_does_not_show_is_no_problem(name):
    row = {"question": "Which?", name: ["1", "2"], "answer": "A"}
    with pytest.raises(NoTruth, match=f"here, column {name}: a multiple choice") as caught:
        read_problem(row, "here")
    assert caught.value.problem == "Which?"
    assert read_problem({**row, name: None}, "here") == ("Which?", "A")
    assert read_problem(row, "here", Columns(("question",), "answer")) == ("Which?", "A")


@pytest.mark.parametrize(("many", "indent"), [(True, None), (True, 2), (False, 2)])
def test_a_json_file_may_hold_a_list_or_one_object(tmp_path, indent, many):
    row = {"problem": "P?", "answer": "1"}
    (tmp_path / "in.json").write_text(json.dumps([row, {**row, "problem": "Q?"}] if many else row, indent=indent))
    output = succeed("rl", tmp_path / "in.json", "--out", tmp_path / "out.parquet")
    assert f"{1 + many} rows\n" in output


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "2+5?"}], "reward_model": {"ground_truth": '["7"]'}},
        {"prompt": [{"role": "user", "content": "2+5?"}], "reward_model": {"ground_truth": [["7"]]}},
        {"question": "2+5?", "gt": "7"},
        {"question": "2+5?", "golden": "7"},
        {"question": "2+5?", "answer": None, "answer_number": 7},
    ],
)
def test_a_list_of_one_and_the_columns_of_tora_cmath_and_mgsm_are_read(row):
    assert read_problem(row, "line 1") == ("2+5?", "7")
