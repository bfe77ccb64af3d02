"""`retool data split`, and the parts that `--part` reads: no problem is on both sides."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.data.files import read_jsonl, read_rows, write_parquet
from retool_mcore.data.leaks import overlap
from retool_mcore.data.lint import lint_file
from retool_mcore.data.rl import rl_row
from retool_mcore.data.split import part_of
from tests.unit.data.commands import refused, succeed

SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "gsm8k_60.jsonl"


def problems(path) -> list[str]:
    return [row["problem"] for _, row in read_jsonl(path)]


def test_no_problem_is_on_both_sides_and_all_rows_are_kept_in_their_order(tmp_path):
    source = tmp_path / "own.jsonl"
    rows = [{"problem": f"What is {n % 40} + 1?", "answer": str(n % 40 + 1), "row": n} for n in range(120)]
    rows[7]["problem"] = "what  is 7 + 1?"
    source.write_text("\n".join(map(json.dumps, rows)))
    output = succeed("split", source, "--hold-out", "20")
    assert "99 rows in" in output and "21 in" in output.replace("\n", " ")
    train, held_out = problems(tmp_path / "own.train.jsonl"), problems(tmp_path / "own.held_out.jsonl")
    assert len(train) == 99 and len(held_out) == 21
    assert not {text.split()[2] for text in train} & {text.split()[2] for text in held_out}
    numbers = [row["row"] for _, row in read_jsonl(tmp_path / "own.train.jsonl")]
    assert numbers == sorted(numbers)
    succeed("split", source, "--hold-out", "20", "--held-out", tmp_path / "again.jsonl")
    assert problems(tmp_path / "again.jsonl") == held_out
    succeed("split", source, "--hold-out", "20", "--held-out", tmp_path / "other.jsonl", "--seed", "1")
    assert problems(tmp_path / "other.jsonl") != held_out


def test_a_file_for_rl_keeps_its_columns(tmp_path):
    rows = [rl_row(f"What is {n} + 1?", str(n + 1), "own", "train", n) for n in range(10)]
    write_parquet(tmp_path / "rl.parquet", rows)
    succeed("split", tmp_path / "rl.parquet", "--hold-out", "3")
    parts = [
        [row for _, row in read_rows(tmp_path / f"rl.{name}.parquet", list(rows[0]))] for name in ("train", "held_out")
    ]
    assert sorted(parts[0] + parts[1], key=lambda row: row["extra_info"]["index"]) == rows
    assert len(parts[1]) == 3


@pytest.mark.parametrize("count", ["2", "50"])
def test_holding_out_all_rows_is_refused_and_nothing_is_written(tmp_path, count):
    source = tmp_path / "own.jsonl"
    source.write_text('{"problem": "1 + 1?", "answer": "2"}\n' * 2)
    assert "leaves none to train on" in refused("split", source, "--hold-out", count).replace("\n", " ")
    assert list(tmp_path.iterdir()) == [source]


def test_the_parts_of_a_training_set_are_disjoint_by_the_leak_check(tmp_path):
    problems: dict[str, list[str]] = {}
    for part in ("sft", "rl", "validation"):
        out = str(tmp_path / f"{part}.parquet")
        share = ["--part", part, "--sft-share", "0.4"]
        succeed("rl", SAMPLE, "--out", out, *share)
        problems[part] = lint_file(out, None, None).problems
    assert sum(map(len, problems.values())) == 60
    for first, second in (("sft", "rl"), ("sft", "validation"), ("rl", "validation")):
        assert overlap(problems[first], problems[second], (first, second)).leaked == 0
    assert overlap(problems["rl"], problems["rl"], ("a", "b")).leaked > 0  # it would be found


@given(st.text(max_size=80), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_of_sft_only_adds_to_it(question, one, other):
    low, high = sorted((one, other))
    assert part_of(question, low) != "sft" or part_of(question, high) == "sft"
    assert part_of(f"  {question.upper()} ".lower(), high) == part_of(question.lower(), high)


def test_a_row_without_a_question_cannot_be_dealt(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input": "1+1", "target": "2"}) + "\n", encoding="utf-8")
    output = refused("rl", path, "--out", tmp_path / "o.parquet", "--part", "rl")
    assert "--part reads the text of column question or problem" in " ".join(output.split())
