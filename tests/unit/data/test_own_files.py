"""Files of users' own: formats, columns that mean something, prompts that are too long."""

import gzip
import json

import pytest

from retool_mcore.data.files import read_jsonl, read_rows, write_parquet
from retool_mcore.data.rl import rl_row
from retool_mcore.data.rl_prompts import normalised_prompt
from retool_mcore.data.tasks import make_task
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from tests.unit.data.commands import refused, succeed

ROWS = [{"problem": "How many primes are below 30?", "answer": "10"}, {"problem": "2 + 2?", "answer": "4"}]


def as_csv(folder):
    path = folder / "own.csv"
    path.write_text('\ufeffproblem,answer\n"How many primes are below 30?",10\n2 + 2?,4\n', encoding="utf-8")
    return path


def as_gzip(folder):
    path = folder / "own.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return path


def as_saved(folder):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(folder / "own")
    return folder / "own"


@pytest.mark.parametrize("written", [as_csv, as_gzip, as_saved])
def test_each_format_is_read(tmp_path, written):
    path, out = written(tmp_path), tmp_path / "out.parquet"
    succeed("rl", path, "--out", out)
    assert [row["reward_model"]["ground_truth"] for _, row in read_rows(out, ["reward_model"])] == ["10", "4"]
    if path.is_file():
        assert [problem.truth for problem in read_problems([path])] == ["10", "4"]


def test_a_saved_folder_is_read_without_what_datasets_keeps_in_it(tmp_path):
    from datasets import load_from_disk

    path, out = as_saved(tmp_path), tmp_path / "out.parquet"
    load_from_disk(path).map(lambda row: {"problem": f"{row['problem']} Say it in Greek.", "answer": row["answer"]})
    assert list(path.glob("cache-*.arrow")), "datasets keeps the result of map there"
    assert "2 rows" in succeed("rl", path, "--out", out).splitlines()


def test_files_that_are_cut_are_one_error(tmp_path):
    whole = as_gzip(tmp_path).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-12])
    (tmp_path / "cut.csv").write_text("problem,answer\nHow many?,1,2\n")
    (tmp_path / "cut.arrow").write_bytes(b"ARROW?")
    for name, why in (
        ("cut.jsonl.gz", "cannot be read"),
        ("cut.csv", "the number of fields differs"),
        ("cut.arrow", "not a complete"),
    ):
        output = refused("rl", tmp_path / name, "--out", tmp_path / "out.parquet").replace("\n", " ")
        assert name in output and why in output


@pytest.mark.parametrize("column", ["images", "videos"])
def test_rows_with_pictures_are_refused_before_conversion_training_and_evaluation(tmp_path, column):
    row = {**rl_row("Find x.", "3", "own", "train", 0), column: ["a.png"]}
    write_parquet(tmp_path / "in.parquet", [row])
    output = refused("rl", tmp_path / "in.parquet", "--out", tmp_path / "out.parquet").replace("\n", " ")
    assert f"row 0, column {column}: the row needs more than text" in output
    with pytest.raises(DataError, match=f"row 0, column {column}: the row needs more than text"):
        read_problems([tmp_path / "in.parquet"])


def test_a_prompt_as_json_text_is_its_turns_for_rl_and_evaluation(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    row = {**rl_row("x", "4", "own", "train", 0), "prompt": json.dumps(turns)}
    write_parquet(tmp_path / "in.parquet", [row])
    output = succeed("rl", tmp_path / "in.parquet", "--out", tmp_path / "out.parquet")
    assert "rows whose system turns are dropped (RL keeps them in a file in verl's schema): 1" in output.replace(
        "\n", " "
    )
    ((_, made),) = read_rows(tmp_path / "out.parquet", ["prompt"])
    assert made["prompt"] == [{"role": "user", "content": "2 + 2?\nPut your final answer within \\boxed{}."}]
    assert normalised_prompt(row["prompt"])[0] == turns
    assert read_problems([tmp_path / "in.parquet"])[0].messages == turns


def test_a_truth_as_bytes_is_its_text(tmp_path):
    write_parquet(tmp_path / "in.parquet", [{"problem": "3 + 4?", "answer": b"7"}])
    succeed("rl", tmp_path / "in.parquet", "--out", tmp_path / "out.parquet")
    ((_, made),) = read_rows(tmp_path / "out.parquet", ["reward_model"])
    assert made["reward_model"]["ground_truth"] == "7"
    write_parquet(tmp_path / "in.parquet", [{"problem": "3 + 4?", "answer": b"\xff"}])
    assert "bytes that are not text" in refused("rl", tmp_path / "in.parquet", "--out", tmp_path / "out.parquet")


def test_repeats_with_another_answer_are_named_by_row(tmp_path):
    rows = [{"problem": "1 + 1?", "answer": answer} for answer in ("2", "3", "2", "4", "5", "6")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = succeed("rl", tmp_path / "in.jsonl", "--out", tmp_path / "out.parquet").replace("\n", " ")
    assert "repeats with a different answer; the first row is kept" in output and ": 4 " in output
    assert "in.jsonl, line 2;" in output and "line 5)" in output


def test_prompts_that_are_too_long_are_dropped_and_counted_as_the_model_sees_them(tmp_path):
    make_task(tmp_path / "task")
    long = {"problem": "Add " + " ".join(map(str, range(400))) + ".", "answer": "79800"}
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [*ROWS, long])))
    asked = ("rl", tmp_path / "in.jsonl", "--out", tmp_path / "out.parquet", "--max-prompt-tokens")
    output = succeed(*asked, "400", "--model", tmp_path / "task" / "model")
    assert "2 after length (1 rejected)" in output
    ((_, reject),) = read_jsonl(tmp_path / "out.rejects.jsonl")
    assert reject["stage"] == "length" and int(reject["reason"].split()[3]) > 400
    assert "none of 3 rows survived" in refused(*asked, "5", "--model", tmp_path / "task" / "model")
    assert "needs --model" in refused(*asked, "5")
