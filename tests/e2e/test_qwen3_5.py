"""SFT, RL with tool calls and export of a tiny Qwen3.5 with two Gated DeltaNet layers of three."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from retool_mcore.data.files import write_parquet
from retool_mcore.data.rl import rl_row
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import FORMAT, tokenizer_rows
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.run.export import find_weights
from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import argv_rl, argv_sft, succeed
from tests.e2e.test_async_trainer import of_its_version
from tests.parity.megatron_ranks import make_model

pytestmark = [pytest.mark.timeout(600)]

QUESTIONS = {"train": [f"What is {number} + 1?" for number in range(4)], "val": ["How many boxes are left?"]}
SFT = ("cluster.gpus_per_node=1", "train.steps=30", "train.global_batch=8", "validation.every=0")
SFT += ("optim.lr=1e-2",)
RL = ("train.prompts_per_step=4", "train.mini_batch_prompts=4", "rollout.group_size=8", "rollout.record_groups=4")
RL += ("train.steps=2", "validation.every=2", "checkpoint.every_steps=1", "optim.lr=2e-3")


def write_task(folder: Path) -> None:
    """A random model, and data for both stages.

    In SFT's data every problem has the same call and, with equal frequency, the answers 7 and 8. RL
    rewards 7. Both of its steps have the same prompts, whose old states an engine must forget.
    """
    tokenizer = build_tokenizer(tokenizer_rows())
    ids: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "num_hidden_layers": 3,
        "max_position_embeddings": 1024,
        "initializer_range": 0.06,
    }
    make_model(folder / "model", "qwen3_5_text", tied=True, **shape, **ids)
    tokenizer.save_pretrained(folder / "model")
    call = {"role": "assistant", "content": "Let me run code.", "tool_calls": [tool_call("print(7)")]}
    answers = [{"role": "assistant", "content": f"The answer is \\boxed{{{number}}}."} for number in (7, 8)]
    for split, questions in QUESTIONS.items():
        conversations = [
            [*FORMAT.messages(question), call, {"role": "tool", "content": "7"}, answer]
            for question in questions
            for answer in answers
        ]
        rows = [{"messages": messages, "tools": [CODE_INTERPRETER]} for messages in conversations]
        write_parquet(folder / f"sft_{split}.parquet", rows)
        rows = [rl_row(text, "7", "seven", split, at, prompt_format=FORMAT) for at, text in enumerate(questions)]
        write_parquet(folder / f"rl_{split}.parquet", rows)


def settings(root: Path, stage: str, model: Path) -> tuple[str, ...]:
    data = (f"data.train_file={root}/{stage}_train.parquet", f'validation.files=["{root}/{stage}_val.parquet"]')
    return (f"run.root={root}", f"run.name={stage}", f"model.path={model}", *data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of SFT and a run of RL that starts from its export."""
    root = tmp_path_factory.mktemp("qwen3_5")
    write_task(root)
    succeed(argv_sft(*settings(root, "sft", root / "model"), *SFT, processes=1), "qwen3_5")
    succeed(argv_rl(*settings(root, "rl", root / "sft/export"), *RL), "qwen3_5")
    return root


@pytest.fixture(scope="module")
def sampled(root: Path) -> list[dict[str, Any]]:
    """The trajectories of RL: 32 of each step and 8 of the validation after the last one."""
    return [json.loads(line) for line in (root / "rl/trajectories/trajectories.jsonl").open()]


@pytest.fixture(scope="module")
def models(root: Path) -> list[torch.nn.Module]:
    """transformers' models of RL's weights: at its start, after its first step, and its export."""
    from transformers import AutoModelForCausalLM

    folders = (root / "sft/export", find_weights(root / "rl/checkpoints/global_step_1"), root / "rl/export")
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def test_sft_teaches_the_call_and_rl_trains(root: Path, sampled: list[dict[str, Any]]):
    losses = [row["loss"] for row in read_metrics(root / "sft/metrics.jsonl")]
    assert losses[0] > 5 and losses[-1] < 0.1
    assert sum(row["behavior"]["calls_ok"] == 1 for row in sampled if row["step"] == 1) > 16  # of 32
    first, second = read_metrics(root / "rl/metrics.jsonl")
    assert first["actor/grad_norm"] > 0 and math.isfinite(second["actor/pg_loss"])


def test_engine_actor_and_transformers_agree_on_the_weights_of_each_step(
    root: Path, sampled: list[dict[str, Any]], models: list[torch.nn.Module]
):
    assert max(row["mismatch/max"] for row in read_metrics(root / "rl/metrics.jsonl")) <= 1e-4
    for version, model in enumerate(models):
        pairs = [pair for row in sampled for pair in of_its_version(row, version, model)]
        assert len(pairs) > 50
        engine, exported = torch.tensor(pairs).unbind(-1)
        torch.testing.assert_close(engine, exported, atol=1e-4, rtol=0)


def test_a_second_turn_continues_from_the_cached_states(sampled: list[dict[str, Any]]):
    called = [row for row in sampled if (row["behavior"]["turns"], row["behavior"]["requests"]) == (2, 2)]
    assert len(called) > 24
    for row in called:  # all but the last token that the first turn sampled
        assert row["behavior"]["cached_tokens"] >= len(row["prompt_ids"]) + row["turns"][0]["tokens"] - 1


def test_a_weight_that_the_engine_lacks_would_be_seen(sampled: list[dict[str, Any]], models: list[torch.nn.Module]):
    """The second step's tokens, with one kind of weight as it was before the first update."""
    second = [row for row in sampled if (row["partition"], row["step"]) == ("train", 2)]
    before = {name: weight for name, weight in models[0].state_dict().items() if ".linear_attn." in name}
    for kind in {name.partition(".linear_attn.")[2] for name in before}:
        stale = {name: weight for name, weight in before.items() if name.endswith(kind)}
        mixed = partial(torch.func.functional_call, models[1], stale)
        pairs = [pair for row in second for pair in of_its_version(row, 1, mixed)]
        assert max(abs(engine - other) for engine, other in pairs) > 1e-3, kind
