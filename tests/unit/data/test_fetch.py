"""`retool data fetch` makes every file that the shipped configurations name."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.data.fetch import RL, SFT, training_and_validation
from retool_mcore.data.files import read_rows, read_source, write_jsonl, write_parquet
from retool_mcore.data.lint import require_disjoint
from tests.unit.data.commands import refused, succeed
from tests.unit.data.test_convert import INLINE

ROOT = Path(__file__).parents[3]


def trace(problem: str) -> dict[str, Any]:
    """A row of ReTool-SFT."""
    content = f"Solve it. You may write code.\n\n*user question:*\n{problem}"
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": INLINE}]}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Copies of the sets in their published forms: one by owner and name, the others by name."""
    hub = tmp_path / "hub"
    for place in ("JoeYing/ReTool-SFT", "DAPO-Math-17k", "AIME_2024", "aime_2025"):
        (hub / place).mkdir(parents=True)
    traces = [trace(f"What is {n} + {n}?") for n in range(40)]
    write_parquet(hub / "JoeYing/ReTool-SFT/train_2000.parquet", [*traces, traces[3]])
    prompts = [[{"role": "user", "content": f"What is {n} times {n}?"}] for n in range(12)]
    problems = [{"prompt": each, "reward_model": {"ground_truth": str(n * n)}} for n, each in enumerate(prompts)]
    write_parquet(hub / "DAPO-Math-17k/dapo-math-17k.parquet", problems * 3)
    write_jsonl(hub / "AIME_2024/aime_2024.jsonl", [{"ID": "I-1", "Problem": "Find n.", "Answer": 70}])
    write_parquet(hub / "aime_2025/train.parquet", [{"problem": "Find m.", "answer": "588"}])
    return hub


def test_every_data_file_of_the_shipped_configurations_is_made():
    named: set[str] = set()
    for path in (ROOT / "configs").glob("*.toml"):
        run = tomllib.loads(path.read_text())
        named |= {run["data"]["train_file"], *run["validation"]["files"]}
    made = {f"data/{file}" for published in (SFT, *RL) for file in published.files}
    assert {name for name in named if not name.startswith("runs/")} <= made


def test_training_reads_the_files_and_existing_ones_are_kept(hub: Path, tmp_path: Path):
    out = tmp_path / "data"
    out.mkdir()
    (out / "aime_2025.parquet").write_text("mine")
    (out / "retool_sft_train.parquet").write_text("of an interrupted command")
    succeed("fetch", out, "--local", hub)
    assert (out / "aime_2025.parquet").read_text() == "mine"
    problems = [row["prompt"][-1]["content"] for _, row in read_rows(out / "dapo_math_17k.parquet", ("prompt",))]
    assert len(problems) == 12 and "What is 3 times 3?" in problems[3]
    ((_, row),) = read_rows(out / "aime_2024.parquet", ("reward_model", "data_source", "extra_info"))
    assert (row["reward_model"]["ground_truth"], row["data_source"]) == ("70", "aime_2024")
    assert row["extra_info"]["split"] == "test"
    train, val = (list(read_rows(out / f"retool_sft_{part}.parquet", ("messages",))) for part in ("train", "val"))
    assert len(train) + len(val) == 41 and 4 <= len(val) <= 5
    require_disjoint(str(out / "retool_sft_train.parquet"), str(out / "retool_sft_val.parquet"))


def test_at_most_a_tenth_and_a_hundred_rows_are_held_out_independently_of_the_order():
    rows = [trace(f"What is {n % 30} + 1?") for n in range(90)]
    train, val = training_and_validation(rows)
    assert (len(train), len(val)) == (81, 9)
    problems = [{row["messages"][0]["content"] for row in part} for part in (train, val)]
    assert not problems[0] & problems[1]
    assert training_and_validation(rows[::-1])[1] == val[::-1]
    assert len(training_and_validation([trace(f"What is {n} + 1?") for n in range(1100)])[1]) == 100


def test_gsm8k_has_both_splits_and_no_socratic_copy(tmp_path: Path):
    for config in ("main", "socratic"):
        (tmp_path / "hub/openai/gsm8k" / config).mkdir(parents=True)
        for split in ("train", "test"):
            row = {"question": f"{config} {split}?", "answer": "#### 3"}
            write_parquet(tmp_path / f"hub/openai/gsm8k/{config}/{split}-00000-of-00001.parquet", [row])
    succeed("fetch", tmp_path / "data", "--local", tmp_path / "hub", "--only", "openai/gsm8k")
    for split in ("train", "test"):
        rows = [row for _, row in read_source(str(tmp_path / f"data/gsm8k/{split}.jsonl"))]
        assert rows == [{"question": f"main {split}?", "answer": "#### 3"}]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["gsm8k"]
    assert "Unknown data set --only gsm8k." in refused("fetch", tmp_path / "data", "--only", "gsm8k")
