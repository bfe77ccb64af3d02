"""On NVIDIA GPUs, with Transformer Engine in bfloat16: adapters mean what the merged model does,
and every layout trains them like one process.

The reference is plain transformers in float32 on the exported model. Tolerances are bfloat16's.
"""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.model.adapter import rounded
from tests.nightly.numerics.test_gpu_parity import ON_GPU, SHAPE, Settings, assert_same_training, jobs, two_gpus
from tests.parity.lora_ranks import adapters
from tests.parity.megatron_ranks import MICRO_BATCH_TOKENS, launch, make_model

pytestmark = ON_GPU
Answers = dict[str, list[Any]]
SEQUENCES = [list(range(2, 40)), list(range(50, 61))]
FP8 = {"adapters": adapters(4, base="fp8")}
ONE: Settings = {
    "one": {},
    "recompute": {"recompute_above": MICRO_BATCH_TOKENS // 2},
    "fused": {"fused": True},
    "some": {"adapters": adapters(4, "q_proj", "v_proj", "up_proj")},
    "fp8": FP8,
    "fp8_recompute": {**FP8, "recompute_above": MICRO_BATCH_TOKENS // 2},
}
TWO: Settings = {
    "tp2": {"layout": {"tp": 2}},
    "tp2_no_sp": {"layout": {"tp": 2}, "transformer": {"sequence_parallel": False}},
    "pp2": {"layout": {"pp": 2}},
    "fp8_tp2": {**FP8, "layout": {"tp": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_lora")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(make_model(folder / "model", platform="cuda", **SHAPE))


def launched(model: str, folder: Path, settings: Settings, ranks: int) -> Answers:
    todo: list[dict[str, Any]] = []
    for name, more in settings.items():
        actions = [
            ["logprobs", SEQUENCES],
            ["train", 1, 4],
            ["logprobs", SEQUENCES],
            ["base_logprobs", SEQUENCES],
            ["export", str(folder / name / "merged")],
            ["frozen_bytes"],
        ]
        todo += jobs(model, {name: {"adapters": adapters(4), **more}}, actions)
    return launch(todo, ranks, folder / f"ranks{ranks}", timeout_s=400)


@pytest.fixture(scope="module")
def one(model: str, folder: Path) -> Answers:
    rounded_model = folder / "rounded"
    make_model(rounded_model, platform="cuda", **SHAPE)
    for file in rounded_model.glob("*.safetensors"):
        made = {name: rounded(weight.bfloat16()) if "_proj.weight" in name else weight
                for name, weight in load_file(file).items()}  # fmt: skip
        save_file(made, file, metadata={"format": "pt"})
    return launched(model, folder, {**ONE, "rounded": {"model": str(rounded_model)}}, 1)


@pytest.fixture(scope="module")
def two(model: str, folder: Path) -> Answers:
    return launched(model, folder, TWO, 2)


def apart(found: list[list[float]], want: list[list[float]]) -> float:
    pairs = [pair for row, other in zip(found, want, strict=True) for pair in zip(row, other, strict=True)]
    return statistics.mean(abs(a - b) for a, b in pairs)


def plain(folder: Path) -> list[list[float]]:
    """Log-probabilities of each next token by transformers in float32."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows: list[list[float]] = []
    with torch.no_grad():
        for ids in SEQUENCES:
            tokens_1T = torch.tensor([ids])
            log_probs_TV = loaded(tokens_1T).logits[0, :-1].log_softmax(-1)
            rows.append(log_probs_TV.gather(-1, tokens_1T[0, 1:, None])[:, 0].tolist())
    return rows


@pytest.mark.parametrize("name", ["one", "some", "fp8"])
def test_adapters_mean_what_the_merged_model_does(one: Answers, folder: Path, name: str):
    before, _, after, base, *_ = one[name]
    assert base == before, "the reference is the base, with the adapters off"
    assert apart(after, before) > 0.02, "what is compared must have been trained"
    assert apart(after, plain(folder / name / "merged")) <= 0.01


@pytest.mark.parametrize("name", ["recompute", "fused"])
def test_what_saves_memory_changes_nothing(one: Answers, name: str):
    assert_same_training(one[name][1], one["one"][1])


@pytest.mark.parametrize("name", ["fp8", "fp8_recompute"])
def test_a_base_in_fp8_trains_as_one_that_was_rounded_before(one: Answers, name: str):
    want = one["rounded"]
    assert_same_training(one[name][1], want[1])
    assert one[name][0] == want[0] != one["one"][0], "log-probabilities before training"
    assert 2 * one[name][5]["matrices"] == want[5]["matrices"]


class TestTwoGpus:
    pytestmark = two_gpus

    @pytest.mark.parametrize("name", TWO)
    def test_every_layout_trains_like_one_process(self, one: Answers, two: Answers, folder: Path, name: str):
        alike = "fp8" if name.startswith("fp8") else "one"
        assert_same_training(two[name][1], one[alike][1])
        assert apart(plain(folder / name / "merged"), plain(folder / alike / "merged")) <= 0.01
