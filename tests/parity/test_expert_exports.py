"""Experts of a layer that are gathered at once are exported as mbridge exports them one by one."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parity.megatron_ranks import WHOLE_EXPERTS, fingerprint, launch_all, make_model

LAYERS, EXPERTS = 4, 4  # as make_model has them
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {  # ranks -> layouts
    1: {"one": {}},
    2: {"ep2": {"ep": 2}, "tp2_ep2_etp1": WHOLE_EXPERTS, "pp2": {"pp": 2}},
    4: {"tp2_ep2": {"tp": 2, "ep": 2}, "ep2_dp2": {"ep": 2}},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model's weights in bfloat16, and layout -> of each rank {"ours", "mbridge"}."""
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
def test_names_order_shapes_types_and_bits_are_those_of_mbridge_and_of_the_model(exports, layout):
    for rank in exports[layout]:
        assert rank["ours"]["weights"] == rank["mbridge"]["weights"]
        assert sorted(rank["ours"]["weights"]) == exports["model"]


@pytest.mark.parametrize(("layout", "groups"), [("ep2", 1), ("tp2_ep2_etp1", 1), ("tp2_ep2", 2)])
def test_a_layers_matrix_of_all_experts_takes_one_gather_in_each_group(exports, layout, groups):
    ranks = 2
    # mbridge gathers each expert of a rank, then each that came over expert tensor parallelism
    of_mbridge = EXPERTS // ranks if groups == 1 else EXPERTS // ranks + EXPERTS
    for rank in exports[layout]:
        spared = rank["mbridge"]["gathers"] - rank["ours"]["gathers"]
        assert spared == LAYERS * 2 * (of_mbridge - groups)
