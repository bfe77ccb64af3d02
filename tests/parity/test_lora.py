"""Adapters train alike in every layout, use no more memory than their size, and agree with peft.

Real verl engines, Megatron-core and gloo.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from retool_mcore.model.adapter import merge
from tests.parity.lora_ranks import adapters
from tests.parity.megatron_ranks import MICRO_BATCH_TOKENS, launch_all, make_model
from tests.parity.test_parallel_parity import assert_alike

TWO = {"tp2": {"tp": 2}, "pp2_vpp2": {"pp": 2, "vpp": 2}, "cp2": {"cp": 2}, "dp2": {}}
SEQUENCES = [list(range(2, 40)), list(range(50, 61))]
DOWN = "model.layers.0.mlp.down_proj.weight"
SOME = ("q_proj", "v_proj", "up_proj")
LAYERS, HIDDEN, FFN, KV, RANK = 4, 64, 96, 32, 4
WEIGHT = LAYERS * RANK * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + FFN))  # of all adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    """Job name -> what its actions returned."""
    models = {name: str(make_model(folder / name, tied=name == "tied")) for name in ("qwen2", "tied")}

    def job(name: str, model: str = "qwen2", **settings: Any) -> dict[str, Any]:
        out = folder / "out" / name
        actions = [["initial"], ["logprobs", SEQUENCES], ["train", 1, 4], ["logprobs", SEQUENCES]]
        actions += [["base_logprobs", SEQUENCES], ["held"], ["export", str(out / "merged")]]
        actions += [["save_adapter", str(out / "adapter")]]
        return {"name": name, "model": models[model], "adapters": adapters(RANK), "actions": actions, **settings}

    one = [job("one"), job("tied", "tied"), job("some", adapters=adapters(RANK, *SOME))]
    one += [job("recompute", recompute_above=MICRO_BATCH_TOKENS // 2)]
    two = [job(name, layout=layout) for name, layout in TWO.items()]
    two += [job("tied_pp2", "tied", layout={"pp": 2})]
    two += [job("some_tp2", layout={"tp": 2}, adapters=adapters(RANK, *SOME))]
    two += [job("tp2_fused", layout={"tp": 2}, fused=True)]
    two += [job("fp8_tp2", layout={"tp": 2}, adapters=adapters(RANK, *SOME, base="fp8"))]  # more in test_fp8_base.py
    save = ["save", str(folder / "saved")]
    two.append(job("saved", layout={"tp": 2}, reshardable=True, actions=[["train", 1, 2], save, ["train", 3, 4]]))
    moved = [["load_other_layout", save[1]], ["train", 3, 4]]
    two += [job("saved_pp2", layout={"pp": 2}, actions=moved), job("saved_dp2", actions=moved)]
    for each in two:  # on which a rank has other tokens than the next
        if each["name"] in ("cp2", "dp2"):
            each["actions"] = [["train", 1, 4]]
    return launch_all({1: one, 2: two}, folder)


def steps(answers: list[Any]) -> list[dict[str, float]]:
    return answers[2] if len(answers) > 2 else answers[0]


def alike(name: str) -> str:
    """The job of one process that another one must train like."""
    first = name.partition("_")[0]
    return first if first in ("tied", "some") else "one"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


CUT = (*TWO, "tied_pp2", "some_tp2", "tp2_fused", "recompute")


@pytest.mark.parametrize("name", CUT)
def test_every_layout_trains_like_one_process(runs: dict[str, list[Any]], name: str):
    got, want = steps(runs[name]), steps(runs[alike(name)])
    assert_alike(got, want)
    assert want[3]["loss"] < want[0]["loss"] - 0.01


@pytest.mark.parametrize("name", ["saved_pp2", "saved_dp2"])
def test_adapters_resume_in_another_layout(runs: dict[str, list[Any]], name: str):
    """Two steps, because an error in Adam's state shows only in the second."""
    want, got = runs["saved"][2], runs[name][1]
    for value in ("loss", "grad_norm"):
        assert [step[value] for step in got] == pytest.approx([step[value] for step in want], abs=1e-4), value


def test_a_model_starts_as_its_base_and_the_base_stays_available(runs: dict[str, list[Any]]):
    initial, before, _, after, base, *_ = runs["one"]
    assert len(initial) == 7 * LAYERS and not any(initial.values())
    assert base == before, "the reference is the base, with the adapters off"
    apart = [abs(a - b) for row, other in zip(after, before, strict=True) for a, b in zip(row, other, strict=True)]
    assert max(apart) > 0.01


def test_nothing_but_adapters_has_gradients_moments_or_master_weights(runs: dict[str, list[Any]]):
    held = runs["one"][5]
    assert held["all"] > 8 * WEIGHT
    for what in ("trained", "in_buffers", "with_main_grad", "main"):
        assert held[what] == WEIGHT, what
    assert held["moments"] == 2 * WEIGHT and held["with_grad"] == 0


@pytest.mark.parametrize("name", [*(name for name in CUT if name not in ("cp2", "dp2")), "fp8_tp2"])
def test_the_export_has_the_adapters_in_the_weights(runs: dict[str, list[Any]], folder: Path, name: str):
    """As the engine would get them; and as the adapters' file and the base make them. A base in fp8
    is exported as it was trained on: row scales of what is cut by its input are of whole rows.
    """
    got, base = weights(folder / "out" / name / "merged"), weights(folder / models_of(name))
    assert got.keys() == base.keys()
    merge(folder / "out" / name / "adapter", folder / "out" / name / "offline")
    offline = weights(folder / "out" / name / "offline")
    assert [weight for weight in got if not torch.equal(offline[weight], got[weight])] == []
    changed = {weight for weight in base if not torch.equal(base[weight], got[weight])}
    if name == "fp8_tp2":
        assert DOWN in changed, "one without an adapter"
    else:
        assert len(changed) == LAYERS * (3 if name.startswith("some") else 7)


def models_of(name: str) -> str:
    return "tied" if name.startswith("tied") else "qwen2"


@pytest.mark.parametrize("name", ["tp2", "pp2_vpp2", "tied_pp2", "some_tp2"])
def test_peft_reads_the_adapters_and_computes_the_same(runs: dict[str, list[Any]], folder: Path, name: str):
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / models_of(name), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "out" / name / "adapter")
    assert logprobs(model) == pytest.approx([value for row in runs[name][3] for value in row], abs=2e-5)


def logprobs(model: Any) -> list[float]:
    found: list[float] = []
    with torch.no_grad():
        for ids in SEQUENCES:
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found += [float(rows[at, token]) for at, token in enumerate(ids[1:])]
    return found
