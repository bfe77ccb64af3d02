"""RL problems of the known schemas, each once, in verl's schema."""

import json

import pytest

from retool_mcore.data.files import read_jsonl, read_rows, read_source, source_files, write_parquet
from retool_mcore.data.layouts import read_problem
from retool_mcore.data.rl import convert_rl, name_and_split
from retool_mcore.errors import DataError
from tests.unit.data.commands import refused, succeed

DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "role": "user",
            "content": "Solve the following math problem step by step. The last line of your response should be of the "
            "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $2 + 2$?\n\n"
            'Remember to put your answer on its own line after "Answer:".',
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a"},
}


def named(*rows):
    return [(f"file, row {index}", row) for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    "row, problem, truth",
    [
        (DAPO, "What is $2 + 2$?", "4"),
        ({"id": 0, "problem": "P?", "answer": "070", "solution": "..."}, "P?", "070"),
        ({"question": "P?", "answer": "It is <<1+1=2>>2.\n#### 1,080"}, "P?", "1080"),
        ({"problem": "P?", "answer": 12345678.0}, "P?", "12345678"),
        ({"problem": "P?", "answer": 0.1234567}, "P?", "0.1234567"),
    ],
)
def test_known_schemas_are_read(row, problem, truth):
    assert read_problem(row, "here") == (problem, truth)


@pytest.mark.parametrize(
    "row, rule",
    [
        ({"text": "P?"}, "here: columns text; known layouts: prompt/reward_model, problem/answer"),
        ({"problem": "P?", "answer": None}, "here, column answer: the answer is None"),
        ({"problem": "P?", "answer": ["4", "5"]}, "here, column answer: the answer is ['4', '5']"),
        ({"problem": "", "answer": "4"}, "here, column problem: the problem is ''"),
        ({"problem": "P?", "answer": float("nan")}, "here, column answer: the answer is nan"),
        ({"problem": "P?", "answer": " "}, "here, column answer: the answer is empty"),
        ({"prompt": [], "reward_model": {"ground_truth": "4"}}, "here, column prompt: no user turn"),
        ({"prompt": DAPO["prompt"], "reward_model": None}, "here, column reward_model: no ground_truth in None"),
    ],
)
def test_other_rows_are_errors_that_name_the_column(row, rule):
    with pytest.raises(DataError) as caught:
        read_problem(row, "here")
    assert rule in str(caught.value)


def test_repeats_are_dropped_and_counted():
    rows = [DAPO] * 100 + [{"problem": "what  is 2+2?", "answer": "4"}, {"problem": "What is 2 - 2?", "answer": "0"}]
    conflict = {"problem": "What is 2 + 2?", "answer": "5"}
    unreadable = {"problem": "Why?", "answer": "\\frac{"}
    report = convert_rl(named(*rows, conflict, unreadable), "mix")
    assert [row["reward_model"]["ground_truth"] for row in report.rows] == ["4", "0"]
    assert report.counts == {"repeat": 101, "answer": 1}
    assert [(reject["where"], reject["stage"]) for reject in report.rejects] == [
        ("file, row 102", "repeat"),
        ("file, row 103", "answer"),
    ]
    assert report.lines()[0] == "104 rows" and "2 after repeat (101 rejected)" in report.lines()


def test_rows_have_verls_schema():
    assert list(convert_rl(named(DAPO), "math_dapo").rows) == [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "What is $2 + 2$?\nPut your final answer within \\boxed{}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0},
        }
    ]


def test_the_command_reads_files_and_folders(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"problem": "P?", "answer": "1"}) + "\n")
    write_parquet(folder / "train.parquet", [DAPO, DAPO])
    out, rejects = tmp_path / "out.parquet", tmp_path / "rejects.jsonl"
    output = refused("rl", folder, "--out", out, "--rejects", rejects)
    assert not out.exists()
    assert "several splits: test.jsonl (test), train.parquet (train). Choose one with --split" in output
    output = succeed("rl", folder / "train.parquet", "--out", out)
    assert "2 rows\n" in output and "1 after repeat (1 rejected)" in output
    succeed("rl", folder, "--out", out, "--rejects", rejects, "--split", "test", "--name", "mine")
    ((_, row),) = read_rows(out, ("data_source", "extra_info"))
    assert row == {"data_source": "mine", "extra_info": {"index": 0, "split": "test"}}


BAD_LINES = [
    b'{"problem": "P?"}',
    b'{"problem": "P?", "answer": ["4", "5"]}',
    b'{"problem": 5, "answer": "4"}',
    b'{"problem": "\xff", "answer": "4"}',
    b'{"problem": "\\ud800", "answer": "4"}',
    b'{"problem": "P?", "answer": ' + b"9" * 5000 + b"}",
    b'{"problem": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"problem": "P?", "answer": NaN}',
    b"[1, 2]",
    b'{"problem": "P',
]


def test_bad_rows_are_rejected_and_counted_when_asked(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_bytes(b"\n".join([b'{"problem": "Q?", "answer": "1"}', *BAD_LINES]))
    output = refused("rl", source, "--out", out)
    assert output.startswith(f"error: {source}, line 2") and not out.exists()
    output = succeed("rl", source, "--out", out, "--reject-bad")
    assert f"{len(BAD_LINES) + 1} rows\n1 after source ({len(BAD_LINES)} rejected)" in output
    rejects = [row for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")]
    assert {row["where"] for row in rejects} == {f"{source}, line {n}" for n in range(2, len(BAD_LINES) + 2)}


@pytest.mark.parametrize(
    "source, name, split",
    [
        ("sets/gsm8k/test.jsonl", "gsm8k", "test"),
        ("sets/aime25.jsonl", "aime25", "train"),
        ("Maxwell-Jia/AIME_2024", "AIME_2024", "train"),
        ("sets/dapo-math-17k.parquet", "dapo-math-17k", "train"),
    ],
)
def test_the_data_source_is_named_after_the_set_and_not_its_split(source, name, split):
    assert name_and_split(source) == (name, split)


def test_a_source_that_is_not_there_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="neither a local file or folder nor a data set that the hub provides"):
        source_files("nobody/no-such-set")
    with pytest.raises(DataError, match="neither a local file or folder"):
        source_files("not a name at all")
    with pytest.raises(DataError, match="no data file of split 'train'"):
        (tmp_path / "test.jsonl").write_text("{}\n")
        source_files(str(tmp_path), "train")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="no rows"):
        list(read_source(str(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="line 1: no column messages; it has problem"):
        (tmp_path / "bad.jsonl").write_text('{"problem": "x"}\n')
        list(read_source(str(tmp_path / "bad.jsonl"), ("messages",)))


def test_a_bad_value_tells_the_columns_and_what_helps():
    message = r"columns: problem, answer, kind\. Choose others with --problem, .* --solution-box, .* --reject-bad"
    with pytest.raises(DataError, match=message):
        convert_rl([("here", {"problem": 5, "answer": "4", "kind": "x"})], "mine")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"problem": "Why?", "answer": None, "kind": "x"}], "none of 1 rows survived; the first: {0}, line 1, column"),
        ([{"problem": 5, "answer": "1"}], "survived; the first: {0}, line 1, column problem: the problem is 5"),
        (
            [{"problem": "P?", "answer": "1", "split": "test"}] * 2,
            "no row can be used (2 rejected by split). Choose another split",
        ),
    ],
)
def test_when_no_row_is_left_the_error_shows_one_and_what_helps(tmp_path, rows, told):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join(map(json.dumps, rows)))
    options = ["--reject-bad", *(["--split", "train"] if "split" in rows[0] else [])]
    output = refused("rl", source, "--out", out, *options)
    assert not out.exists()
    assert told.format(source) in output
    if "split" not in rows[0]:
        assert f"A row: problem = {rows[0]['problem']!r}, answer = " in output
        assert "--problem, and --answer, or --solution-box" in output
