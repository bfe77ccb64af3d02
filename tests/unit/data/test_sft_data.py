"""SFT rows become tokens once, and a step's batch depends on the seed and the step only."""

import json
import sys

import pytest

from retool_mcore.config.files import parquet_files
from retool_mcore.data.chat import TokenizedChat, render
from retool_mcore.data.files import write_parquet
from retool_mcore.data.sft import BatchesOfRank, cost, deal, load_sft
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.errors import DataError

USER = {"role": "user", "content": "2 + 2?"}
FINAL = {"role": "assistant", "content": "\\boxed{4}"}
CALL = {"role": "assistant", "content": "", "tool_calls": [tool_call("print(2 + 2)")]}
TOOL_ROW = {"messages": [USER, CALL, {"role": "tool", "content": "4"}, FINAL], "tools": [CODE_INTERPRETER]}
TEXT_ROW = {"messages": [USER, FINAL], "tools": None}
LONG_ROW = {"messages": [{"role": "user", "content": "1 + 2 = " * 500}, FINAL], "tools": None}


def examples(*lengths: int) -> list[TokenizedChat]:
    return [TokenizedChat([index] * length, [1] * length) for index, length in enumerate(lengths)]


def ids(batch: list[TokenizedChat]) -> list[int]:
    return [example.token_ids[0] for example in batch]


def test_rows_of_several_files_are_rendered_in_the_order_of_the_file_names(tmp_path, tokenizer):
    parts = tmp_path / "parts"
    parts.mkdir()
    write_parquet(parts / "b.parquet", [{**TOOL_ROW, "tools": json.dumps(TOOL_ROW["tools"])}])
    write_parquet(parts / "c.parquet", [LONG_ROW])
    write_parquet(parts / "a.parquet", [TEXT_ROW])
    (parts / "notes.txt").write_text("not data")
    expected = [render(row["messages"], row["tools"], tokenizer) for row in (TEXT_ROW, TOOL_ROW)]
    longest = max(map(len, expected))
    files = parquet_files(str(parts))
    assert files == parquet_files(f"{parts}/*.parquet") == parquet_files(f"{tmp_path}/p*/[abc].parquet")
    data = load_sft(files, tokenizer, max_length_tokens=longest)
    assert [(list(row.token_ids), list(row.loss_mask)) for row in data.examples] == [
        (row.token_ids, row.loss_mask) for row in expected
    ]
    assert data.num_tokens == sum(map(len, expected)) and data.too_long == (2,)
    used_bytes = sum(sys.getsizeof(part) for row in data.examples for part in (row.token_ids, row.loss_mask))
    assert used_bytes < 6 * data.num_tokens + 400, "every rank keeps all of the data in memory"
    assert "1 of 3 rows are longer" in (data.dropped_note() or "")
    assert load_sft(files, tokenizer, 100_000).dropped_note() is None
    with pytest.raises(DataError, match="all 3 rows are longer"):
        load_sft(files, tokenizer, max_length_tokens=1)
    with pytest.raises(DataError, match="no parquet file found"):
        parquet_files(str(tmp_path / "x*.parquet"))


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"messages": "hello", "tools": None}, "row 0, column messages: str, not a list"),
        ({"messages": [USER], "tools": "[3]"}, "row 0, column tools: "),
        ({"messages": [{"role": "user", "content": None}], "tools": None}, "message 0 (user): content is NoneType"),
        ({"prompt": "x", "tools": None}, "no column messages; it has prompt, tools. `retool data sft` writes such"),
    ],
)
def test_a_bad_row_is_an_error_with_file_row_and_column(tmp_path, tokenizer, row, rule):
    good, path = tmp_path / "good.parquet", tmp_path / "sft.parquet"
    write_parquet(good, [TEXT_ROW])
    write_parquet(path, [row])
    with pytest.raises(DataError) as caught:
        load_sft([str(good), str(path)], tokenizer, max_length_tokens=1000)
    assert str(caught.value).startswith(str(path)) and rule in str(caught.value)


def test_the_order_of_rows_depends_on_the_seed_and_the_step_only():
    # A change of this literal would break the resume of every running job.
    assert BatchesOfRank(examples(*[1] * 8), global_batch=8, seed=1).rows(1) == [1, 6, 0, 3, 7, 4, 2, 5]
    assert BatchesOfRank(examples(*[1] * 5), global_batch=4, seed=1, shuffle=False).rows(2) == [4, 0, 1, 2]
    batches = BatchesOfRank(examples(1, 2, 3, 4, 5), global_batch=4, seed=0)
    stream = [row for step in range(1, 6) for row in batches.rows(step)]
    epochs = [stream[start : start + 5] for start in range(0, 20, 5)]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each in its own order"
    assert sorted(BatchesOfRank(examples(1, 2), global_batch=5, seed=0).rows(1)) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_the_global_batch_does_not_depend_on_dp():
    data = examples(*[(number * 7) % 31 + 1 for number in range(40)])
    for step in range(1, 6):
        whole = sorted(ids(BatchesOfRank(data, global_batch=8, seed=5)(step)))
        for dp_size in (2, 4, 8):
            ranks = [BatchesOfRank(data, 8, seed=5, dp_size=dp_size, dp_rank=rank)(step) for rank in range(dp_size)]
            assert sorted(row for rank in ranks for row in ids(rank)) == whole
            assert {len(rank) for rank in ranks} == {8 // dp_size}
    with pytest.raises(DataError, match="cannot split a batch of 3 equally over 2 ranks"):
        BatchesOfRank(examples(1), global_batch=3, seed=0, dp_size=2)


def test_ranks_get_the_same_number_of_sequences_with_about_equal_cost_of_which_attention_is_a_part():
    assert deal([100, 90, 50, 40, 10, 10], num_ranks=2) == [[0, 3, 4], [1, 2, 5]]
    assert cost(1200) == 1200
    assert cost(1200, hidden_size=100) == 2400  # attention costs as much as the rest at 12 hidden sizes
    data = examples(6000, 4000, 3000, 2500, 1, 1, 1, 1)

    def rank_of_the_longest(hidden_size):
        ranks = [ids(BatchesOfRank(data, 8, 0, 2, rank, hidden_size=hidden_size)(1)) for rank in range(2)]
        return next(rank for rank in ranks if 0 in rank)

    assert 3 in rank_of_the_longest(None)  # 6000 + 2500 against 4000 + 3000 tokens
    assert 3 not in rank_of_the_longest(100)  # the longest outweighs the other three
