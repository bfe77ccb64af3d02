"""SFT rows and their batches."""

import json
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retool_mcore.data.chat import Rendered, render
from retool_mcore.data.files import write_parquet
from retool_mcore.data.sft import PackedBatches, cost, deal, load_sft
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.errors import DataError

TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(2 + 2)"}}}
            ],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "\\boxed{4}"},
    ],
    "tools": [CODE_INTERPRETER],
}
TEXT_ROW = {"messages": [TOOL_ROW["messages"][0], TOOL_ROW["messages"][3]], "tools": None}


def examples(*lengths: int) -> list[Rendered]:
    return [Rendered([index] * length, [1] * length) for index, length in enumerate(lengths)]


def in_full(example: Rendered) -> tuple[list[int], list[int]]:
    return list(example.token_ids), list(example.loss_mask)


def ids(batch: list[Rendered]) -> list[int]:
    return [example.token_ids[0] for example in batch]


def test_rows_survive_the_parquet_file_and_tools_may_be_json_text_there(tmp_path, tokenizer):
    path = str(tmp_path / "sft.parquet")
    write_parquet(path, [{**TOOL_ROW, "tools": json.dumps(TOOL_ROW["tools"])}, TEXT_ROW])
    data = load_sft(path, tokenizer, max_length_tokens=1000)
    assert in_full(data.examples[0]) == in_full(render(TOOL_ROW["messages"], TOOL_ROW["tools"], tokenizer))
    assert in_full(data.examples[1]) == in_full(render(TEXT_ROW["messages"], None, tokenizer))


def test_several_files_are_one_in_the_order_of_their_names(tmp_path, tokenizer):
    parts = tmp_path / "parts"
    parts.mkdir()
    rows = [
        TOOL_ROW,
        {**TEXT_ROW, "messages": [{"role": "user", "content": "x " * 500}, TEXT_ROW["messages"][1]]},
        TEXT_ROW,
    ]
    for name, row in zip(("b", "c", "a"), rows, strict=True):
        write_parquet(parts / f"{name}.parquet", [row])
    (parts / "notes.txt").write_text("not data")
    write_parquet(tmp_path / "one.parquet", [rows[2], rows[0], rows[1]])
    one = load_sft(str(tmp_path / "one.parquet"), tokenizer, max_length_tokens=400)
    assert one.too_long == (2,)
    for named in (parts, parts / "*.parquet", tmp_path / "p*" / "[abc].parquet"):
        found = load_sft(str(named), tokenizer, max_length_tokens=400)
        assert [in_full(each) for each in found.examples] == [in_full(each) for each in one.examples]
        assert found.too_long == one.too_long and found.source == str(named)
    write_parquet(parts / "d.parquet", [TEXT_ROW, {"messages": None, "tools": None}])
    with pytest.raises(DataError, match=r"d\.parquet, row 1, column messages"):
        load_sft(str(parts), tokenizer, max_length_tokens=400)
    for none in (tmp_path / "x*.parquet", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(DataError, match="no parquet file found"):
            load_sft(str(none), tokenizer, max_length_tokens=400)


def test_a_token_takes_five_bytes(tmp_path, tokenizer):
    """Every rank has all of the data, of which a step takes some rows."""
    rows = [{"messages": [{"role": "user", "content": "1 + 2 = " * 500}, *TEXT_ROW["messages"][1:]], "tools": None}]
    write_parquet(tmp_path / "sft.parquet", rows * 20)
    load_sft(str(tmp_path / "sft.parquet"), tokenizer, max_length_tokens=100_000)  # what imports and caches take
    tracemalloc.start()
    data = load_sft(str(tmp_path / "sft.parquet"), tokenizer, max_length_tokens=100_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data.num_tokens > 20_000
    assert held < 6 * data.num_tokens


def test_rows_over_the_budget_are_left_out_and_told(tmp_path, tokenizer):
    path = str(tmp_path / "sft.parquet")
    write_parquet(path, [TEXT_ROW, TOOL_ROW])
    long, short = (len(render(row["messages"], row["tools"], tokenizer)) for row in (TOOL_ROW, TEXT_ROW))
    data = load_sft(path, tokenizer, max_length_tokens=long - 1)
    assert data.too_long == (1,)
    assert len(data.examples) == 1
    assert data.num_tokens == short
    said = f"{path}: 1 of 2 rows are longer than data.max_length_tokens = {long - 1} and left out; the first is row 1"
    assert data.dropped_note(long - 1) == said
    assert load_sft(path, tokenizer, max_length_tokens=long).dropped_note(long) is None
    with pytest.raises(DataError, match="all 2 rows are longer"):
        load_sft(path, tokenizer, max_length_tokens=1)


ASKED = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    "row, rule",
    [
        ({"messages": "hello", "tools": None}, "messages: str, not a list"),
        ({"messages": ASKED, "tools": "[3]"}, "tools: "),
        ({"messages": ASKED, "tools": None}, "messages: no assistant turn"),
        (
            {"messages": [{"role": "user", "content": None}], "tools": None},
            "messages: message 0 (user): content is NoneType, neither text nor a tool call",
        ),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_column(tmp_path, tokenizer, row, rule):
    path = str(tmp_path / "sft.parquet")
    write_parquet(path, [row])
    with pytest.raises(DataError) as caught:
        load_sft(path, tokenizer, max_length_tokens=1000)
    assert str(caught.value).startswith(f"{path}, row 0, column {rule}")


def test_missing_columns_and_files_are_named(tmp_path, tokenizer):
    path = str(tmp_path / "sft.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        load_sft(path, tokenizer, max_length_tokens=10)
    write_parquet(path, [{"prompt": "x", "tools": None}])
    with pytest.raises(DataError, match="no column messages; it has prompt, tools"):
        load_sft(path, tokenizer, max_length_tokens=10)
    write_parquet(path, [TEXT_ROW])
    whole = (tmp_path / "sft.parquet").read_bytes()
    (tmp_path / "sft.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not a complete parquet file"):
        load_sft(path, tokenizer, max_length_tokens=10)
    pq.write_table(pa.table({"messages": pa.array([], pa.string()), "tools": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="no rows"):
        load_sft(path, tokenizer, max_length_tokens=10)


def test_batches_run_over_the_end_of_an_epoch():
    batches = PackedBatches(examples(1, 2, 3, 4, 5), global_batch=4, seed=0)
    stream = [i for step in range(1, 6) for i in batches.rows(step)]
    assert [sorted(stream[i : i + 5]) for i in range(0, 20, 5)] == [[0, 1, 2, 3, 4]] * 4
    tiny = PackedBatches(examples(1, 2), global_batch=5, seed=0)
    assert Counter(tiny.rows(1)) in (Counter({0: 3, 1: 2}), Counter({0: 2, 1: 3}))


def test_a_step_is_a_pure_function_of_the_seed():
    batches = PackedBatches(examples(*range(1, 30)), global_batch=4, seed=3)
    later = PackedBatches(examples(*range(1, 30)), global_batch=4, seed=3)
    steps = [batches(step) for step in range(1, 21)]
    assert later(17) == steps[16]
    assert [batches.rows(s) for s in range(1, 9)] == [
        PackedBatches(examples(*range(1, 30)), 4, seed=3).rows(s) for s in range(1, 9)
    ]
    other = PackedBatches(examples(*range(1, 30)), global_batch=4, seed=4)
    assert [other.rows(s) for s in range(1, 9)] != [batches.rows(s) for s in range(1, 9)]


def test_the_order_is_frozen_across_versions():
    # A change of this literal would break the resume of every running job.
    assert PackedBatches(examples(*[1] * 8), global_batch=8, seed=1).rows(1) == [1, 6, 0, 3, 7, 4, 2, 5]


def test_the_global_batch_does_not_depend_on_dp():
    data = examples(*[(i * 7) % 31 + 1 for i in range(40)])
    for step in range(1, 12):
        whole = sorted(ids(PackedBatches(data, global_batch=8, seed=5)(step)))
        for dp_size in (2, 4, 8):
            ranks = [PackedBatches(data, 8, seed=5, dp_size=dp_size, dp_rank=r)(step) for r in range(dp_size)]
            assert sorted(i for rank in ranks for i in ids(rank)) == whole
            assert {len(rank) for rank in ranks} == {8 // dp_size}


def test_ranks_get_equally_many_sequences_of_about_equal_cost():
    shares = deal([100, 90, 50, 40, 10, 10], num_ranks=2)
    assert shares == [[0, 3, 4], [1, 2, 5]]
    costs = [(i * 37) % 101 + 1 for i in range(64)]
    loads = [sum(costs[i] for i in share) for share in deal(costs, 8)]
    assert max(loads) - min(loads) <= 8
    in_order = [sum(costs[i : i + 8]) for i in range(0, 64, 8)]
    assert max(in_order) - min(in_order) > 100


def test_attention_makes_long_sequences_dearer_than_their_tokens():
    assert cost(1200) == 1200
    assert cost(1200, hidden_size=100) == 2400  # attention costs as much as the rest at 12 hidden sizes
    data = examples(6000, 4000, 3000, 2500, 1, 1, 1, 1)

    def beside_the_longest(hidden_size):
        ranks = [ids(PackedBatches(data, 8, 0, 2, rank, hidden_size=hidden_size)(1)) for rank in range(2)]
        return sorted(next(rank for rank in ranks if 0 in rank))[1:]

    assert 3 in beside_the_longest(None)  # 6000 + 2500 against 4000 + 3000 tokens
    assert 3 not in beside_the_longest(100)  # the longest alone outweighs the other three


def test_a_batch_that_cannot_be_dealt_is_refused():
    with pytest.raises(DataError, match="batch of 3 from 1 examples has no equal share for rank 0 of 2"):
        PackedBatches(examples(1), global_batch=3, seed=0, dp_size=2)
