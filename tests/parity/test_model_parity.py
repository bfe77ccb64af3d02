"""A model is what its config.json says: Megatron's log-probabilities are those of transformers.

Real verl TrainingWorker and Megatron-Bridge, tiny random models, float32, one process and two over
gloo. Lengths are below and above the context before the scaling. A step at learning rate 0 and an
export give the model back.
"""

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.files import tensor_files
from tests.model_parity import LONGEST, ONE, SAMPLED, TWO, Case, sequences
from tests.parity.megatron_ranks import launch_all, make_model

PUBLISHED = "qwen3_default_tied"
EXPORT = Path("model", "huggingface")  # in an actor's checkpoint
ALL = pytest.mark.parametrize("case", [*ONE, *TWO], ids=lambda case: case.name)
SAVED = pytest.mark.parametrize("case", [case for case in [*ONE, *TWO] if case.saved], ids=lambda case: case.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for case in {case.model: case for case in [*ONE, *TWO]}.values():
        make_model(folder / case.model, **case.settings())
    with_second_copy(folder / PUBLISHED)
    return folder


def with_second_copy(model: Path) -> None:
    """As Qwen3-1.7B is published: tied, with the output matrix once more in a shard of its own."""
    weights = load_file(model / "model.safetensors")
    copy = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    (model / "model.safetensors").unlink()
    files: dict[str, str] = {}
    for number, shard in ((1, weights), (2, copy)):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(shard, model / name)
        files |= dict.fromkeys(shard, name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    _, files = tensor_files(str(folder)) or (folder, {})
    read = {name: tensor for file in set(files.values()) for name, tensor in load_file(folder / file).items()}
    assert read.keys() == files.keys()
    return read


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """Case -> log-probabilities of ``sequences``; each is exported after a step at rate 0, and a
    resume from a checkpoint that is gone by then.
    """

    def job(case: Case) -> dict[str, Any]:
        first, saved = (str(folder / f"{case.name}_{name}") for name in ("first", "saved"))
        actions: list[list[Any]] = [["logprobs", sequences()]]
        if case.saved:
            actions += [["train", 1, 1], ["save_for_a_run", first], ["resume", first], ["save_for_a_run", saved]]
        more = {"layout": case.layout, "lr": 0.0, "micro_batch_tokens": LONGEST, "asynchronous": True}
        return {"name": case.name, "model": str(folder / case.model), "actions": actions, **more}

    found = launch_all({1: [job(case) for case in ONE], 2: [job(case) for case in TWO]}, folder)
    return {name: answers[0] for name, answers in found.items()}


@cache
def by_transformers(model: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [
            network(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            for ids in sequences()
        ]


@ALL
def test_megatron_computes_what_transformers_does(found: dict[str, Any], folder: Path, case: Case):
    for got, want in zip(found[case.name], by_transformers(folder / case.model), strict=True):
        torch.testing.assert_close(torch.tensor(got), want, atol=1e-4, rtol=0)


@ALL
def test_the_checks_of_a_run_take_it(folder: Path, case: Case):
    model = str(folder / case.model)
    check_model(
        load_config(SftConfig, "configs/sft_tiny_cpu.toml", [f"model.path={model}", "data.max_length_tokens=200"])
    )
    sampled = nullcontext() if case.rope in SAMPLED else pytest.raises(ConfigError, match="SFT supports it")
    with sampled:
        rl = ["rollout.max_response_tokens=100", "data.max_prompt_tokens=100", f"model.path={model}"]
        check_model(load_config(RlConfig, "configs/rl_tiny_cpu.toml", rl))


@SAVED
def test_a_step_at_rate_0_and_an_export_give_the_model_back(found: dict[str, Any], folder: Path, case: Case):
    source, export = folder / case.model, folder / f"{case.name}_saved" / EXPORT
    assert json.loads((export / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    want, got = weights(source), weights(export)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
