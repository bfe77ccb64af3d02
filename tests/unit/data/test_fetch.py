"""`retool data fetch`: every file that the shipped configurations name, from copies of the hub."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.fetch import RL, SFT, training_and_validation
from retool_mcore.data.files import read_rows, read_source, write_jsonl, write_parquet
from retool_mcore.data.lint import require_disjoint

ROOT = Path(__file__).parents[3]


def trace(problem: str) -> dict[str, Any]:
    """A row as ReTool-SFT has it."""
    said = (
        "I add.\n<code>\n```python\nprint(2 + 2)\n```\n</code>\n<interpreter>\n4\n</interpreter>\n"
        "<answer>\n\\boxed{4}\n</answer>"
    )
    asked = f"Solve it. You may write code.\n\n*user question:*\n{problem}"
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def dapo(problem: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": problem}], "reward_model": {"ground_truth": answer}}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Copies of the sets in their published forms: one by owner and name, the others by name."""
    hub = tmp_path / "hub"
    for place in ("JoeYing/ReTool-SFT", "DAPO-Math-17k", "AIME_2024", "aime_2025"):
        (hub / place).mkdir(parents=True)
    traces = [trace(f"What is {n} + {n}?") for n in range(40)]
    write_parquet(hub / "JoeYing/ReTool-SFT/train_2000.parquet", [*traces, traces[3]])
    problems = [dapo(f"What is {n} times {n}?", str(n * n)) for n in range(12)]
    write_parquet(hub / "DAPO-Math-17k/dapo-math-17k.parquet", problems * 3)
    write_jsonl(hub / "AIME_2024/aime_2024.jsonl", [{"ID": "I-1", "Problem": "Find n.", "Answer": 70}])
    write_parquet(hub / "aime_2025/train.parquet", [{"problem": "Find m.", "answer": "588"}])
    return hub


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["fetch", *map(str, words)])


def test_every_data_file_of_the_shipped_configurations_is_made():
    named: set[str] = set()
    for path in (ROOT / "configs").glob("*.toml"):
        run = tomllib.loads(path.read_text())
        named |= {run["data"]["train_file"], *run["validation"]["files"]}
    made = {f"data/{file}" for published in (SFT, *RL) for file in published.files}
    assert {name for name in named if not name.startswith("runs/")} <= made


def test_copies_become_what_training_reads(hub: Path, tmp_path: Path):
    out = tmp_path / "data"
    done = invoke(out, "--local", hub)
    assert done.exit_code == 0, done.output
    problems = [row["prompt"][-1]["content"] for _, row in read_rows(out / "dapo_math_17k.parquet", ("prompt",))]
    assert len(problems) == 12 and "What is 3 times 3?" in problems[3]
    for name, truth in (("aime_2024", "70"), ("aime_2025", "588")):
        columns = ("reward_model", "data_source")
        ((_, row),) = read_rows(out / f"{name}.parquet", columns)
        assert (row["reward_model"]["ground_truth"], row["data_source"]) == (truth, name)
    train, val = (list(read_rows(out / f"retool_sft_{part}.parquet", ("messages",))) for part in ("train", "val"))
    assert len(train) + len(val) == 41 and 4 <= len(val) <= 5
    require_disjoint(str(out / "retool_sft_train.parquet"), str(out / "retool_sft_val.parquet"))


def test_what_is_there_stays(hub: Path, tmp_path: Path):
    out = tmp_path / "data"
    out.mkdir()
    (out / "aime_2025.parquet").write_text("mine")
    done = invoke(out, "--local", hub)
    assert done.exit_code == 0 and "aime_2025.parquet already exist" in done.output
    assert (out / "aime_2025.parquet").read_text() == "mine"


def test_what_is_missing_is_one_error_that_says_where_to_place_it(hub: Path, tmp_path: Path):
    (hub / "aime_2025" / "train.parquet").unlink()
    done = invoke(tmp_path / "data", "--local", hub)
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert f"error: yentinglin/aime_2025 is missing: {hub}/aime_2025: no data file" in done.output
    assert f"to {hub}/owner/name and add --local {hub}" in done.output
    assert (tmp_path / "data" / "aime_2024.parquet").exists()


def test_a_problem_is_on_one_side_only_and_a_tenth_at_most_is_held_out():
    rows = [trace(f"What is {n % 30} + 1?") for n in range(90)]
    train, val = training_and_validation(rows)
    assert len(train) + len(val) == 90 and len(val) == 9
    asked = [{row["messages"][0]["content"] for row in part} for part in (train, val)]
    assert not asked[0] & asked[1]
    again = training_and_validation(rows[::-1])[1]
    assert again == val[::-1], "whatever the order of the rows"


def test_one_set_alone_is_gsm8k_with_both_splits_and_no_socratic_copy(tmp_path: Path):
    for config in ("main", "socratic"):
        (tmp_path / "hub/openai/gsm8k" / config).mkdir(parents=True)
        for split, number in (("train", 3), ("test", 5)):
            row = {"question": f"{config} {split}?", "answer": f"#### {number}"}
            write_parquet(tmp_path / f"hub/openai/gsm8k/{config}/{split}-00000-of-00001.parquet", [row])
    done = invoke(tmp_path / "data", "--local", tmp_path / "hub", "--only", "openai/gsm8k")
    assert done.exit_code == 0, done.output
    files = {split: tmp_path / f"data/gsm8k/{split}.jsonl" for split in ("train", "test")}
    found = {split: [row for _, row in read_source(str(file))] for split, file in files.items()}
    assert found == {
        "train": [{"question": "main train?", "answer": "#### 3"}],
        "test": [{"question": "main test?", "answer": "#### 5"}],
    }
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["gsm8k"]
