"""Shares by weight, and no row lost or favoured."""

import json
from collections import Counter
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.files import read_rows, write_parquet
from retool_mcore.data.rl import rl_row
from retool_mcore.data.sft import load_sft
from retool_mcore.data.split import mix
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.errors import DataError


def rl_file(path, name, count, split="train"):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(path, [rl_row(f"Is {name}{n} odd?", "4", name, split, n) for n in range(count)])
    return str(path)


def invoke(*arguments):
    return CliRunner().invoke(app, ["mix", *map(str, arguments)])


def problems(path):
    return [row["prompt"][0]["content"].split()[1] for _, row in read_rows(path, ("prompt",))]


def test_rows_are_dealt_by_weight(tmp_path):
    a, b = (rl_file(tmp_path / f"{name}.parquet", name, 100) for name in "ab")
    out = tmp_path / "out.parquet"
    result = invoke(f"{a}=3", f"{b}=1", "--out", out)
    assert result.exit_code == 0, result.output
    assert Counter(problem[0] for problem in problems(out)) == {"a": 100, "b": 33}
    assert len(set(problems(out))) == 133
    assert f"{b}: 33 of the rows, from 100 (0.33 times each)" in result.output
    assert "133 rows in" in result.output
    assert {row["data_source"] for _, row in read_rows(out, ("data_source",))} == {"a", "b"}


@settings(max_examples=25)
@example(sizes=[1] * 4, weights=[Fraction(1, 10), Fraction(6, 5), Fraction(22, 5), Fraction(175, 18)], rows=101, seed=0)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    weights=st.lists(st.fractions(Fraction(1, 10), 10, max_denominator=20), min_size=4, max_size=4),
    rows=st.integers(100, 160),
    seed=st.integers(0, 9),
)
def test_shares_are_exact_to_a_row_and_no_row_is_favoured(tmp_path_factory, sizes, weights, rows, seed):
    folder = tmp_path_factory.mktemp("mix")
    names = [rl_file(folder / f"{'abcd'[i]}.parquet", "abcd"[i], size) for i, size in enumerate(sizes)]
    pairs = list(zip(names, weights, strict=False))
    total = sum(weights[: len(sizes)])
    try:
        mix(pairs, folder / "out.parquet", rows=rows, seed=seed)
    except DataError as error:  # a share below one row may be rounded to none, which is told
        assert min(weights[: len(sizes)]) / total * rows < 1 and "is left for its weight" in str(error)
        return
    found = problems(folder / "out.parquet")
    assert len(found) == rows
    for letter, size, weight in zip("abcd", sizes, weights, strict=False):
        own = Counter(problem for problem in found if problem[0] == letter)
        assert abs(sum(own.values()) - weight / total * rows) < 1
        assert max(own.values()) - (min(own.values()) if len(own) == size else 0) <= 1


def test_sources_are_interleaved_and_the_seed_decides(tmp_path):
    a, b = (rl_file(tmp_path / f"{name}.parquet", name, 200) for name in "ab")
    orders = []
    for seed in (0, 0, 1):
        assert invoke(a, b, "--rows", 200, "--seed", seed, "--out", tmp_path / "out.parquet").exit_code == 0
        orders.append(problems(tmp_path / "out.parquet"))
    assert orders[0] == orders[1] != orders[2]
    runs = sum(one[0] != other[0] for one, other in zip(orders[0], orders[0][1:], strict=False))
    assert 70 < runs < 130  # of 199 places; 100 on average
    assert set(orders[0]) != set(orders[2])


def test_sft_files_of_both_forms_mix_into_what_training_reads(tmp_path, tokenizer):
    asked = {"role": "user", "content": "What is 2 + 2?"}
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(4)"}}}
    said = {"role": "assistant", "content": "\\boxed{4}"}
    called = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}, said]
    write_parquet(
        tmp_path / "calls.parquet", [{"messages": called, "tools": [CODE_INTERPRETER], "ground_truth": "4"}] * 3
    )
    write_parquet(tmp_path / "plain.parquet", [{"messages": [asked, said], "tools": None}] * 3)
    mix([(str(tmp_path / f"{name}.parquet"), Fraction(1)) for name in ("calls", "plain")], tmp_path / "out.parquet")
    mixed = load_sft(str(tmp_path / "out.parquet"), tokenizer, max_length_tokens=10_000).examples
    alone = [
        load_sft(str(tmp_path / f"{name}.parquet"), tokenizer, max_length_tokens=10_000).examples[0]
        for name in ("calls", "plain")
    ]
    assert Counter(tuple(each.token_ids) for each in mixed) == {tuple(each.token_ids): 3 for each in alone}


def test_what_cannot_be_mixed_is_one_error_and_leaves_no_file(tmp_path):
    a, test = rl_file(tmp_path / "a.parquet", "a", 9), rl_file(tmp_path / "held.parquet", "t", 9, split="test")
    write_parquet(tmp_path / "sft.parquet", [{"messages": [], "tools": None}])
    write_parquet(tmp_path / "raw.parquet", [{"problem": "P?", "answer": "1"}])
    (tmp_path / "x.jsonl").write_text(json.dumps(rl_row("P?", "1", "x", "train", 0)))
    (tmp_path / "both").mkdir()
    for name in ("train", "test"):
        rl_file(tmp_path / "both" / f"{name}.parquet", "b", 3)
    for sources, told in (
        ([a], "1 source: a mix has two or more"),
        ([a, f"{a}=much"], "'much' is not a weight above 0. Name a source as PATH=WEIGHT"),
        ([a, tmp_path / "no.parquet"], "no.parquet: cannot be read: there is no such file"),
        ([a, tmp_path / "sft.parquet"], "for RL. Mix each kind by itself"),
        ([a, tmp_path / "raw.parquet"], "columns problem, answer; SFT reads messages, tools and RL"),
        ([a, tmp_path / "x.jsonl"], "x.jsonl: a mix reads parquet"),
        ([a, tmp_path / "both"], "holds files of several splits"),
        ([a, test], "a row of split 'test' after rows of 'train'"),
        ([a, f"{a}=1/1000"], "no row of 9 is left for its weight 1/1000"),
    ):
        result = invoke(*sources, "--out", tmp_path / "out.parquet")
        assert result.exit_code == 2 and result.output.startswith("error: "), (sources, result.output)
        assert told in result.output, (sources, result.output)
        assert not (tmp_path / "out.parquet").exists()
