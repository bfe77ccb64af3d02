"""`retool plan` takes the lengths of prompts and rows from the run's own data file."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.data.chat import render
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.planner import data_lengths
from retool_mcore.planner.data_lengths import lengths_of_data_file
from retool_mcore.planner.lengths import PROMPT, RESPONSE, assumed
from retool_mcore.rollout.protocol import protocol_of
from tests.unit.planner.plans import CONFIGS

PROBLEMS = ["What is 1 + 2?", "What is 12 + 34?", "What is " + " + ".join(map(str, range(100, 130))) + "?"]
TURNS = [[{"role": "user", "content": problem}] for problem in PROBLEMS]
TOOLS = [None, [CODE_INTERPRETER], None]
SAID = {"role": "assistant", "content": "It is \\boxed{3}."}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[str]:
    """Settings of a model and of a file of three prompts."""
    file = tmp_path_factory.mktemp("plan") / "rl.parquet"
    of_all = {"data_source": "math", "reward_model": {"ground_truth": "3"}}
    pq.write_table(pa.Table.from_pylist([{"prompt": each, **of_all} for each in TURNS]), file)
    return [f"model.path={model_dir}", f"data.train_file={file}"]


def rl_of(settings: list[str]) -> RlConfig:
    return load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", settings)


def test_prompts_are_as_long_as_the_rollout_renders_them(here: list[str]):
    config = rl_of(here)
    protocol = protocol_of(config.rollout, tokenizer_of(config.model))
    tokens = [len(protocol.prompt_ids(each)) for each in TURNS]
    found = lengths_of_data_file(config)
    assert found is not None and (found.mean, found.longest) == (pytest.approx(sum(tokens) / 3), max(tokens))
    lengths = assumed(config, None, found)
    assert lengths.prompt == found.mean != PROMPT * config.data.max_prompt_tokens
    assert lengths.mean == pytest.approx(RESPONSE * config.rollout.max_response_tokens)
    assert f"{max(tokens)} at most (3 rows)" in lengths.note and "is assumed" in lengths.note
    assert assumed(config, 500.0, found).mean == pytest.approx(500 - found.mean)
    known = assumed(config, 60.0)
    assert (known.prompt, known.mean) == (30, 30), "a mean below twice the assumed prompt is halved"


def test_rows_of_sft_are_their_whole_conversations_up_to_the_limit(here: list[str], tmp_path: Path):
    rows = [{"messages": [*turns, SAID], "tools": tools} for turns, tools in zip(TURNS, TOOLS, strict=True)]
    written = [row | {"tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(written), tmp_path / "sft.parquet")
    settings = [*here, f"data.train_file={tmp_path}/sft.parquet"]
    config = load_config(SftConfig, CONFIGS / "sft_tiny_cpu.toml", settings)
    tokens = [len(render(row["messages"], row["tools"], tokenizer_of(config.model))) for row in rows]
    lengths = assumed(config, None, lengths_of_data_file(config))
    assert (lengths.shortest, lengths.longest) == (min(tokens), max(tokens))
    assert lengths.mean == pytest.approx(sum(tokens) / 3)
    assert assumed(config, 77.0, lengths_of_data_file(config)).mean == 77


def test_of_a_large_file_some_rows_are_rendered_from_all_of_it(here: list[str], monkeypatch: pytest.MonkeyPatch):
    for limit, counted in ((1, "(1 of 3 rows)"), (2, "(3 rows)")):
        monkeypatch.setattr(data_lengths, "ROWS", limit)
        found = lengths_of_data_file(rl_of(here))
        assert found is not None and counted in found.note


@pytest.mark.parametrize("missing", ["model.path=elsewhere/model", "data.train_file=elsewhere.parquet"])
def test_without_the_file_or_the_model_lengths_are_assumed(here: list[str], missing: str):
    assert lengths_of_data_file(rl_of([*here, missing])) is None
