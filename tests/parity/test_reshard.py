"""A run resumed takes the same next two steps as the uninterrupted run, on another layout too.

Two steps, because an error in Adam's state shows only in the second. Real verl engines,
Megatron-core and gloo, in new processes: nothing survives but the folder.
"""

from typing import Any

import pytest

from tests.parity.megatron_ranks import launch, make_model

LAYOUTS: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2}, "dp2": {}, "one": {}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # layout and settings of a run that is saved after three steps
    "tp2": ("tp2", {"reshardable": True}),
    "pp2": ("pp2", {"reshardable": True}),
    "dp2": ("dp2", {"reshardable": True}),
    "experts_tp2": ("tp2", {"reshardable": True, "kind": "qwen3_moe"}),
    "hybrid_tp2": ("tp2", {"reshardable": True, "kind": "qwen3_5_text"}),
    "parts_dp2": ("dp2", {}),
    "parts_pp2": ("pp2", {}),
    "parts_ep2": ("ep2", {"kind": "qwen3_moe"}),
    "parts_hybrid_pp2": ("pp2", {"kind": "qwen3_5_text"}),
    "parts_bfloat16": ("dp2", {"dtype": "bfloat16"}),
}
SAME = ("tp2", "parts_pp2", "parts_ep2", "parts_hybrid_pp2", "parts_bfloat16")
# Without checkpoint.reshardable only dp may change.
MOVED = [
    ("tp2", "dp2"), ("pp2", "tp2"), ("dp2", "pp2"), ("tp2", "one"), ("experts_tp2", "dp2"), ("hybrid_tp2", "pp2"),
    ("parts_dp2", "one"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Job name -> the answers of its actions, the last two: random numbers, two steps."""
    folder = tmp_path_factory.mktemp("reshard")
    models = {kind: str(make_model(folder / kind, kind)) for kind in ("qwen2", "qwen3_moe")}
    models["qwen3_5_text"] = str(make_model(folder / "hybrid", "qwen3_5_text"))

    def job(name: str, run: str, layout: str, *actions: list[Any], **settings: Any) -> dict[str, Any]:
        own = {"dtype": "float32", "kind": "qwen2", **RUNS[run][1], **settings}
        last = [["draw"], ["train", 4, 5]]
        return {
            **own,
            "name": name,
            "model": models[own["kind"]],
            "layout": LAYOUTS[layout],
            "actions": [*actions, *last],
        }

    first = []
    for name, (layout, _) in RUNS.items():
        first.append(job(name, name, layout, ["train", 1, 3], ["save", str(folder / name)]))
    two = [job(f"{run}_again", run, RUNS[run][0], ["load", str(folder / run)], reshardable=False) for run in SAME]
    one = []
    for run, layout in MOVED:
        moved = job(f"{run}_{layout}", run, layout, ["load_other_layout", str(folder / run)], reshardable=False)
        (one if layout == "one" else two).append(moved)
    answers = launch(first, 2, folder / "first")
    return answers | launch(two, 2, folder / "two") | launch(one, 1, folder / "one")


@pytest.mark.parametrize(("run", "layout"), MOVED)
def test_the_next_two_steps_on_another_layout_are_those_of_the_uninterrupted_run(runs, run: str, layout: str):
    want, got = runs[run][-1], runs[f"{run}_{layout}"][-1]
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in got] == pytest.approx([step[name] for step in want], abs=1e-4), name
    assert [step["lr"] for step in got] == [step["lr"] for step in want]


@pytest.mark.parametrize("run", SAME)
def test_a_run_continues_bit_exactly_on_its_own_layout(runs, run: str):
    assert runs[f"{run}_again"][-2:] == runs[run][-2:], "random numbers, then two steps"
