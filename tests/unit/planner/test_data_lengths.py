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

TOOLS = [None, json.dumps([CODE_INTERPRETER]), None]
SAID = {"role": "assistant", "content": "It is \\boxed{3}."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A model, a file of three prompts and one of three conversations."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model").symlink_to(model_dir)
    turns = [[{"role": "user", "content": problem}] for problem in PROBLEMS]
    prompts = [{"prompt": each, "data_source": "math", "reward_model": {"ground_truth": "3"}} for each in turns]
    rows = [{"messages": [*each, SAID], "tools": tools} for each, tools in zip(turns, TOOLS, strict=True)]
    pq.write_table(pa.Table.from_pylist(prompts), folder / "rl.parquet")
    pq.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")
    return folder


def rl_of(folder: Path, *settings: str) -> RlConfig:
    here = [f"model.path={folder}/model", f"data.train_file={folder}/rl.parquet"]
    return load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", [*here, *settings])


def test_prompts_are_as_long_as_the_rollout_renders_them(folder: Path):
    config = rl_of(folder)
    protocol = protocol_of(config.rollout, tokenizer_of(config.model))
    tokens = [len(protocol.prompt_ids([{"role": "user", "content": problem}])) for problem in PROBLEMS]
    found = lengths_of_data_file(config)
    assert found is not None and (found.mean, found.longest) == (pytest.approx(sum(tokens) / 3), max(tokens))
    lengths = assumed(config, None, found)
    assert lengths.prompt == found.mean != PROMPT * config.data.max_prompt_tokens
    assert lengths.mean == pytest.approx(RESPONSE * config.rollout.max_response_tokens), (
        "a response stays assumed, and the note says so"
    )
    assert f"{max(tokens)} at most (3 rows)" in lengths.note and "is assumed" in lengths.note
    assert assumed(config, 500.0, found).mean == pytest.approx(500 - found.mean)
    known = assumed(config, 60.0)
    assert (known.prompt, known.mean) == (30, 30), "a mean below twice the assumed prompt is halved"


def test_rows_of_sft_are_their_whole_conversations_up_to_the_limit(folder: Path):
    here = [f"model.path={folder}/model", f"data.train_file={folder}/sft.parquet"]
    config = load_config(SftConfig, CONFIGS / "sft_tiny_cpu.toml", here)
    tokenizer = tokenizer_of(config.model)
    offered = [None, [CODE_INTERPRETER], None]
    tokens = [
        len(render([{"role": "user", "content": problem}, SAID], tools, tokenizer))
        for problem, tools in zip(PROBLEMS, offered, strict=True)
    ]
    lengths = assumed(config, None, lengths_of_data_file(config))
    assert (lengths.shortest, lengths.mean, lengths.longest) == (
        min(tokens),
        pytest.approx(sum(tokens) / 3),
        max(tokens),
    )
    assert assumed(config, 77.0, lengths_of_data_file(config)).mean == 77


def test_of_a_large_file_some_rows_are_rendered_from_all_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_lengths, "ROWS", 1)
    found = lengths_of_data_file(rl_of(folder))
    assert found is not None and "(1 of 3 rows)" in found.note and found.longest < 150
    monkeypatch.setattr(data_lengths, "ROWS", 2)
    found = lengths_of_data_file(rl_of(folder))
    assert found is not None and "(3 rows)" in found.note


@pytest.mark.parametrize("missing", ["model.path=elsewhere/model", "data.train_file=elsewhere.parquet"])
def test_without_the_file_or_the_model_lengths_are_assumed_as_before(folder: Path, missing: str):
    config = rl_of(folder, missing)
    assert lengths_of_data_file(config) is None
    assert assumed(config, None, None) == assumed(config, None)
