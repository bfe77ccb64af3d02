"""An FP8 base is a base of rounded weights: in training, over layouts, in engines and in exports.

The models have columns of very different size, so that a row's scale depends on all of the row:
scales of a rank's columns alone would round otherwise.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.model.adapter import merge, rounded
from tests.parity.lora_ranks import adapters
from tests.parity.megatron_ranks import MICRO_BATCH_TOKENS, launch_all, make_model
from tests.parity.test_lora import FFN, HIDDEN, KV, LAYERS, RANK, SEQUENCES, SOME, weights

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator"),
]
FP8 = adapters(RANK, *SOME, base="fp8")
MATRICES = LAYERS * (2 * HIDDEN * (HIDDEN + KV) + 3 * HIDDEN * FFN)
TWINS = {name: name.replace("fp8", "rounded") for name in ("fp8", "fp8_recompute", "fp8_tp2", "fp8_pp2")}


def is_matrix(name: str) -> bool:
    return "_proj.weight" in name


def write_models(folder: Path) -> None:
    """The base, and the base with rounded matrices."""
    [file] = make_model(folder / "base").glob("*.safetensors")
    found = load_file(file)
    for name, weight in found.items():
        if is_matrix(name):
            weight[:, weight.shape[1] // 2 :] *= 2.0**-12
    make_model(folder / "rounded")
    save_file(found, file, metadata={"format": "pt"})
    made = {name: rounded(weight) if is_matrix(name) else weight for name, weight in found.items()}
    save_file(made, folder / "rounded" / file.name, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8_base")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    """Job name -> what its actions returned."""
    write_models(folder)

    def job(name: str, **settings: Any) -> dict[str, Any]:
        out, kind = folder / "out" / name, name.partition("_")[0]
        actions = [["train", 1, 3], ["logprobs", SEQUENCES], ["base_logprobs", SEQUENCES], ["frozen_bytes"]]
        actions += [["export", str(out / "merged")], ["save_adapter", str(out / "adapter")]]
        how = {"model": str(folder / "base"), "adapters": FP8}
        if kind == "rounded":
            how = {"model": str(folder / "rounded"), "adapters": adapters(RANK, *SOME)}
        return {"name": name, "actions": actions, **how, **settings}

    one = [job("fp8"), job("rounded"), job("plain", adapters=adapters(RANK, *SOME))]
    one += [job(f"{kind}_recompute", recompute_above=MICRO_BATCH_TOKENS // 2) for kind in ("fp8", "rounded")]
    layouts = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}
    two = [job(f"{kind}_{name}", layout=layout) for name, layout in layouts.items() for kind in ("fp8", "rounded")]
    save = ["save", str(folder / "saved")]
    two.append(job("fp8_saved", layout={"tp": 2}, actions=[["train", 1, 2], save, ["train", 3, 4]]))
    two.append(job("fp8_resumed", layout={"tp": 2}, actions=[["load", save[1]], ["train", 3, 4]]))
    return launch_all({1: one, 2: two}, folder)


@pytest.mark.parametrize("name", TWINS)
def test_it_trains_as_a_base_that_was_rounded_before(runs: dict[str, list[Any]], name: str):
    got, want = runs[name], runs[TWINS[name]]
    assert got[:3] == want[:3], "losses, gradient norms and log-probabilities, the reference's too"


def test_it_trains_nearly_as_the_base_itself(runs: dict[str, list[Any]]):
    got, want = ([step["loss"] for step in runs[name][0]] for name in ("fp8", "plain"))
    assert got != want and got == pytest.approx(want, rel=0.02)


def test_a_frozen_matrix_takes_a_byte_a_value(runs: dict[str, list[Any]]):
    assert runs["plain"][3]["matrices"] == 4 * MATRICES
    assert runs["fp8"][3]["matrices"] == runs["fp8_recompute"][3]["matrices"] == MATRICES
    assert runs["fp8_tp2"][3]["matrices"] == runs["fp8_pp2"][3]["matrices"] == MATRICES // 2
    assert runs["fp8"][3]["others"] == runs["plain"][3]["others"]


def test_a_resumed_run_is_exact(runs: dict[str, list[Any]]):
    assert runs["fp8_resumed"][1] == runs["fp8_saved"][2]


@pytest.mark.parametrize("name", [name for name in TWINS if name != "fp8_recompute"])
def test_engines_and_exports_get_the_rounded_base_with_the_adapters(
    runs: dict[str, list[Any]], folder: Path, name: str
):
    """Like those of the rounded model's run, and what the adapters' file and the base make."""
    out = folder / "out"
    got, want = weights(out / name / "merged"), weights(out / TWINS[name] / "merged")
    assert got.keys() == want.keys() and [each for each in got if not torch.equal(got[each], want[each])] == []
    merge(out / name / "adapter", out / name / "offline")
    offline = weights(out / name / "offline")
    assert [each for each in got if not torch.equal(got[each], offline[each])] == []
    base = weights(folder / "base")
    apart = {each for each in got if not torch.equal(got[each], base[each])}
    assert apart == {each for each in got if is_matrix(each)}, "those without adapters, too"
