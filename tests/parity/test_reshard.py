"""A run resumed on another layout takes the same next two steps as the uninterrupted run.

Two steps, because an error in Adam's state shows only in the second. Real verl engines,
Megatron-core and gloo.
"""

import pytest
import torch

from tests.parity.megatron_ranks import launch, make_model

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "one": {}}
SAVED = ("tp2", "pp2", "dp2")
RESHARDED = [("tp2", "dp2"), ("pp2", "tp2"), ("dp2", "pp2"), ("tp2", "one")]
RESHARDED_RANKS = [("dp2", "one")]  # without checkpoint.reshardable: only dp may change


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Job name -> the answers of its actions."""
    folder = tmp_path_factory.mktemp("reshard")
    models = {kind: str(make_model(folder / kind, kind)) for kind in ("qwen2", "qwen3_moe")}

    def job(name, layout, *actions, model="qwen2", **settings):
        return {
            "name": name,
            "model": models[model],
            "layout": LAYOUTS[layout],
            "dtype": "float32",
            "actions": actions,
        } | settings

    def resumed(source, target, kind):
        steps = (["load_other_layout", str(folder / kind / source)], ["train", 4, 5])
        return job(f"{kind}_{source}_{target}", target, *steps, model="qwen3_moe" if kind == "experts" else "qwen2")

    first = []
    for layout in SAVED:
        before, after = ["train", 1, 3], ["train", 4, 5]
        save = ["save", str(folder / "whole" / layout)]
        first.append(job(layout, layout, before, save, ["draw"], after, reshardable=True))
    save = ["save", str(folder / "experts" / "tp2")]
    first.append(job("experts_tp2", "tp2", before, save, ["draw"], after, model="qwen3_moe", reshardable=True))
    parts = ["save", str(folder / "parts" / "dp2")]
    first.append(job("dp2_parts", "dp2", ["train", 1, 3], parts))
    answers = launch(first, 2, folder / "first")
    pairs = [(*pair, "whole") for pair in RESHARDED] + [(*pair, "parts") for pair in RESHARDED_RANKS]
    two = [resumed("tp2", "dp2", "experts"), *(resumed(*pair) for pair in pairs if pair[1] != "one")]
    two.append(job("same", "tp2", ["load", str(folder / "whole" / "tp2")], ["draw"], ["train", 4, 5]))
    one = [resumed(*pair) for pair in pairs if pair[1] == "one"]
    return answers | launch(two, 2, folder / "two") | launch(one, 1, folder / "one")


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [("whole", *pair) for pair in RESHARDED] + [("parts", *pair) for pair in RESHARDED_RANKS],
)
def test_the_next_two_steps_are_those_of_the_uninterrupted_run(runs, kind, source, target):
    check_two_steps(runs[source][3], runs[f"{kind}_{source}_{target}"][1])


def test_the_next_two_steps_of_experts_too(runs):
    check_two_steps(runs["experts_tp2"][3], runs["experts_tp2_dp2"][1])


def check_two_steps(want: list[dict[str, float]], got: list[dict[str, float]]) -> None:
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in got] == pytest.approx([step[name] for step in want], abs=1e-4), name
    assert [step["lr"] for step in got] == [step["lr"] for step in want]


def test_a_reshardable_checkpoint_continues_bit_exactly_on_its_own_layout(runs):
    assert runs["same"][1:] == runs["tp2"][2:], "random numbers, then two steps"
