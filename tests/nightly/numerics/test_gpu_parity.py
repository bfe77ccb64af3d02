"""On NVIDIA GPUs, with Transformer Engine in bfloat16: every layout trains like one process, and
like float32.

The reference is plain transformers in float32, one sequence at a time. Tolerances are those of
bfloat16.
"""

import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from retool_mcore.platforms import get_platform
from retool_mcore.rollout.server import SglangServer
from tests.model_parity import ROPES
from tests.parity.megatron_ranks import MICRO_BATCH_TOKENS, launch, make_model
from tests.parity.plain_transformers import plain_transformers

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device in this machine"),
]
pytestmark = ON_GPU
two_gpus = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

Settings = dict[str, dict[str, Any]]
Steps = list[dict[str, float]]
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
COMPACT = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
ONE: Settings = {
    "one": {},
    "recompute": {"transformer": RECOMPUTE},
    "recompute_auto": {"recompute_above": MICRO_BATCH_TOKENS // 2},
    "fused_cross_entropy": {"fused": True},
    "compact_states": {"optim": COMPACT},
}
FP8: Settings = {name: {"transformer": {"fp8": "hybrid", "fp8_recipe": name}} for name in ("tensorwise", "blockwise")}
COOL, BONUS = {"temperature": 0.7}, {"entropy_bonus": 0.5}
OTHER_LOSSES: Settings = {"cool": COOL, "bonus": BONUS, "cool_bonus": {**COOL, **BONUS}}
FUSED_LOSSES: Settings = {f"fused_{name}": {"fused": True, **settings} for name, settings in OTHER_LOSSES.items()}
TWO = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "pp2_vpp2": {"pp": 2, "vpp": 2}, "cp2": {"cp": 2}, "dp2": {}}
FOUR_STEPS = ["train", 1, 4]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}  # heads of 64, as the kernels want
PROMPTS = [[random.Random(i).randrange(2, 258) for _ in range(4 + 5 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("gpu") / "model", platform="cuda", **SHAPE))


def jobs(model: str, settings: Settings, actions: list[Any]) -> list[dict[str, Any]]:
    common = {"model": model, "platform": "cuda", "actions": actions}
    return [{"name": name, **common, **more} for name, more in settings.items()]


def trained(model: str, settings: Settings, ranks: int, folder: Path) -> dict[str, Steps]:
    """The four steps of each of the settings."""
    answers = launch(jobs(model, settings, [FOUR_STEPS]), ranks, folder, timeout_s=400)
    return {name: answer[0] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def one(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    return trained(model, {**ONE, **OTHER_LOSSES, **FUSED_LOSSES, **FP8}, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    settings = {name: {"layout": layout} for name, layout in TWO.items()}
    return trained(model, settings, 2, tmp_path_factory.mktemp("two"))


def assert_close(found: Steps, loss: list[float], norm: list[float]) -> None:
    assert [step["loss"] for step in found] == pytest.approx(loss, rel=5e-3)
    assert [step["grad_norm"] for step in found] == pytest.approx(norm, rel=2e-2)


def assert_same_training(found: Steps, other: Steps) -> None:
    assert_close(found, [step["loss"] for step in other], [step["grad_norm"] for step in other])


def assert_like_float32(found: Steps, model: str) -> None:
    want = plain_transformers(model, lrs=[0.0, *(step["lr"] for step in found[:-1])])
    assert_close(found, [loss for loss, _ in want], [norm for _, norm in want])


def test_one_process_trains_like_float32(one: dict[str, Steps], model: str):
    assert_like_float32(one["one"], model)


@pytest.mark.parametrize("rope", ["llama3", "yarn", "yarn with attention_factor"])
def test_scaled_positions_train_like_float32(rope: str, tmp_path: Path):
    """Rows are longer than the context before the scaling, which Megatron's fused kernel for RoPE
    knows nothing of.
    """
    positions = ROPES[rope] | {"rope_theta": 1000.0, "original_max_position_embeddings": 8}
    model = str(make_model(tmp_path / "model", platform="cuda", rope_parameters=positions, **SHAPE))
    assert_like_float32(trained(model, {"scaled": {}}, 1, tmp_path / "ranks")["scaled"], model)


def test_deltanet_layers_have_the_gradients_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By flash-linear-attention's kernels, and on Hopper TileLang's, which have no CPU version.

    The first step has learning rate 0, so two batches' gradients are those of the initial weights.
    The second step's update shows the gradient of each weight: Adam's first updates are as long for
    a small gradient as for a large one. Later steps are not compared, because bfloat16 alone moves
    the third step's gradient norm by 6 %.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

    for kernel in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "FusedRMSNormGated"):
        monkeypatch.setattr(reference, kernel, None)  # transformers would call them with CPU tensors, too
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = make_model(tmp_path / "model", "qwen3_5_text", platform="cuda", **heads, **SHAPE)
    actions = [["train", 1, 2], ["export", str(tmp_path / "found")]]
    steps = launch(jobs(str(model), {"one": {}}, actions), 1, tmp_path / "ranks", timeout_s=800)["one"][0]
    want = plain_transformers(str(model), lrs=[0.0, steps[0]["lr"]], export=tmp_path / "want")
    assert_close(steps, [loss for loss, _ in want], [norm for _, norm in want])
    before = weights(model)
    found, expected = (updates(weights(tmp_path / name), before) for name in ("found", "want"))
    alike = {name: torch.cosine_similarity(found[name], expected[name], dim=0).item() for name in expected}
    # Matrices have 0.98 or more if transformers itself computes in bfloat16. Vectors have few
    # elements, and the norms' weights are rounded to steps of 0.008, which is more than an update.
    small = {name: value for name, value in alike.items() if value < (0.95 if len(expected[name]) > 2000 else 0.5)}
    assert not small, f"{small} of {alike}"


def updates(trained: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The changes of the weights by training; those of one name in all layers are one vector."""
    changes: dict[str, list[torch.Tensor]] = {}
    for name, weight in before.items():
        kind = re.sub(r"layers\.\d+\.", "", name)
        changes.setdefault(kind, []).append((trained[name].float() - weight.to(trained[name].dtype).float()).flatten())
    return {kind: torch.cat(parts) for kind, parts in changes.items()}


SAVERS = [(name, "one") for name in ONE if name != "one"]


@pytest.mark.parametrize(("name", "other"), [*SAVERS, *zip(FUSED_LOSSES, OTHER_LOSSES, strict=True)])
def test_what_saves_memory_changes_nothing(one: dict[str, Steps], name: str, other: str):
    assert_same_training(one[name], one[other])


@pytest.mark.parametrize("recipe", FP8)
def test_fp8_has_the_gradients_of_bfloat16(one: dict[str, Steps], recipe: str):
    """With packed lengths that are no multiples of 16, here 5 to 40.

    verl pads each sequence, and stretches the last one to fill 128, for which Transformer Engine
    once multiplied gradients (its issues 2892 and 2911).
    """
    for found, want in zip(one[recipe], one["one"], strict=True):
        assert found["loss"] == pytest.approx(want["loss"], rel=2e-2)
        assert found["grad_norm"] == pytest.approx(want["grad_norm"], rel=0.1)


def test_memory_is_reserved_for_adams_states(model: str, tmp_path: Path):
    role = {"role": "actor", "auto": False}
    updates = jobs(model, {"float32": role, "compact": {"optim": COMPACT, **role}}, [["update"]])
    for answer in launch(updates, 1, tmp_path / "ranks", timeout_s=400).values():
        held, made, still = answer[0]["states"]
        assert (held, still) == (made, 0) and made > 0


class TestTwoGpus:
    pytestmark = two_gpus

    @pytest.mark.parametrize("name", TWO)
    def test_every_layout_trains_like_one_process(self, one: dict[str, Steps], two: dict[str, Steps], name: str):
        assert_same_training(two[name], one["one"])

    def test_a_resumed_run_is_bit_exact(self, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        saved, exports = str(tmp_path / "saved"), [str(tmp_path / name) for name in ("straight", "resumed")]
        first = [["train", 1, 2], ["save", saved], ["train", 3, 4], ["export", exports[0]]]
        again = [["load", saved], ["train", 3, 4], ["export", exports[1]]]
        layout = {"tp2": {"layout": {"tp": 2}}}
        straight = launch(jobs(model, layout, first), 2, tmp_path / "a")["tp2"]
        resumed = launch(jobs(model, layout, again), 2, tmp_path / "b")["tp2"]
        assert resumed[1] == straight[2]
        want, got = (weights(Path(folder)) for folder in exports)
        assert [name for name in want if not torch.equal(want[name], got[name])] == []


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_sglang_computes_what_megatron_trained(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Log-probabilities of sampled tokens, in both, before any update and after each of two."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")  # the server's key follows from it
    extra = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.2"]
    options: dict[str, Any] = {"dtype": "bfloat16", "max_running_requests": 8, "extra_args": extra}
    with SglangServer(model, get_platform("cuda"), log_path=tmp_path / "log", **options) as server:
        actions = [["rollout_gap", server.port, PROMPTS]]
        for step in (1, 2):
            actions += [["train", step, step], ["sync", server.port], ["rollout_gap", server.port, PROMPTS]]
        answers = launch(jobs(model, {"one": {}}, actions), 1, tmp_path / "ranks", timeout_s=400)["one"]
    for gap in answers[0], answers[3], answers[6]:
        apart = sorted(abs(a - b) for a, b in zip(gap["sglang"], gap["megatron"], strict=True))
        assert len(apart) == len(PROMPTS) * 24
        mean, p99 = statistics.mean(apart), apart[math.ceil(0.99 * len(apart)) - 1]
        assert mean <= 0.01 and p99 <= 0.05 and apart[-1] <= 0.1
