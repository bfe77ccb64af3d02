"""A Megatron engine on the CPU resumes bit-exactly from verl's checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.megatron_ranks import launch, make_model

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
LAYOUTS = {"pp2": {"pp": 2}, "dp2": {}, "ep2": {"ep": 2}}  # the last one of a model with experts
CASES = [("pp2", "float32"), ("ep2", "float32"), ("dp2", "bfloat16")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(layout, dtype) -> answers and exported weights of the straight run, and of the one resumed
    in a new engine.
    """
    folder = tmp_path_factory.mktemp("resume")
    models = {kind: str(make_model(folder / kind, kind)) for kind in ("qwen2", "qwen3_moe")}
    straight, resumed = [], []
    for layout, dtype in CASES:
        name = f"{layout}_{dtype}"
        model = models["qwen3_moe" if layout == "ep2" else "qwen2"]
        job = {"name": name, "model": model, "layout": LAYOUTS[layout], "dtype": dtype}
        checkpoint = str(folder / name / "checkpoint")
        after = [["draw"], ["train", 3, 5], ["export", str(folder / name / "straight")]]
        straight.append(job | {"actions": [["draw"], ["train", 1, 2], ["save", checkpoint], *after]})
        after = [["draw"], ["train", 3, 5], ["export", str(folder / name / "resumed")]]
        resumed.append(job | {"actions": [["load", checkpoint], *after]})
    straight_answers = launch(straight, 2, folder / "first")
    resumed_answers = launch(resumed, 2, folder / "second")  # new processes: nothing survives but the folder
    return {
        (layout, dtype): (
            straight_answers[f"{layout}_{dtype}"],
            resumed_answers[f"{layout}_{dtype}"],
            *(load_file(folder / f"{layout}_{dtype}" / kind / "model.safetensors") for kind in ("straight", "resumed")),
        )
        for layout, dtype in CASES
    }


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_resume_continues_bit_exactly(runs, case):
    straight, resumed, straight_weights, resumed_weights = runs[case]
    assert resumed[2] == straight[4], "losses, gradient norms and learning rates of steps 3 to 5"
    assert [n for n in straight_weights if not torch.equal(straight_weights[n], resumed_weights[n])] == []


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_random_generator_continues(runs, case):
    straight, resumed, *_ = runs[case]
    assert resumed[1] == straight[3]
    assert straight[3] != straight[0]
