"""Each layout exports a model with experts bit by bit, in the same order on each rank."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parity.megatron_ranks import WHOLE_EXPERTS, fingerprint, launch_all, make_model

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {  # ranks -> layouts
    1: {"one": {}},
    2: {"ep2": {"ep": 2}, "tp2_ep2_etp1": WHOLE_EXPERTS, "pp2": {"pp": 2}},
    4: {"tp2_ep2": {"tp": 2, "ep": 2}, "ep2_dp2": {"ep": 2}},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model's weights in bfloat16, and layout -> of each rank its export."""
    folder = tmp_path_factory.mktemp("exports")
    model = make_model(folder / "model", "qwen3_moe")
    jobs = {
        ranks: [
            {"name": name, "model": str(model), "layout": layout, "dtype": "bfloat16", "actions": [["exports"]]}
            for name, layout in layouts.items()
        ]
        for ranks, layouts in LAYOUTS.items()
    }
    found: dict[str, Any] = {name: answers[0] for name, answers in launch_all(jobs, folder).items()}
    weights = load_file(model / "model.safetensors")
    return {**found, "model": sorted(fingerprint(name, weight.bfloat16()) for name, weight in weights.items())}


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_each_rank_exports_the_models_bits(exports, layout):
    first, *others = exports[layout]
    assert sorted(first) == exports["model"]
    assert all(other == first for other in others)
