"""Experts of a layer that are gathered at once are exported as mbridge exports them one by one."""

import json

import pytest
import torch

from tests.parity.expert_exports import EXPERTS
from tests.parity.megatron_ranks import WHOLE_EXPERTS, make_model
from tests.parity.rank_processes import by_fork

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator"),
]
LAYERS = 4
LAYOUTS = {  # ranks -> layouts
    1: {"one": {}},
    2: {"ep2": {"ep": 2}, "tp2_ep2_etp1": WHOLE_EXPERTS, "pp2": {"pp": 2}},
    4: {"tp2_ep2": {"tp": 2, "ep": 2}, "ep2_dp2": {"ep": 2}},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Layout -> of each rank {"ours", "mbridge"}."""
    folder = tmp_path_factory.mktemp("exports")
    model = make_model(folder / "model", "qwen3_moe")
    found = {}
    for ranks, layouts in LAYOUTS.items():
        files = folder / f"jobs{ranks}.json", folder / f"out{ranks}.json"
        files[0].write_text(json.dumps({"model": str(model), "layouts": layouts}))
        log = folder / f"log{ranks}"
        assert by_fork("tests.parity.expert_exports", files, ranks, log, 300), log.read_text()[-6000:]
        of_ranks = json.loads(files[1].read_text())
        found |= {name: [each[name] for each in of_ranks] for name in layouts}
    return found


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_names_order_shapes_types_and_bits_are_those_of_mbridge(exports, layout):
    for rank in exports[layout]:
        assert rank["ours"]["weights"] == rank["mbridge"]["weights"]
        experts = [name for name, *_ in rank["ours"]["weights"] if ".mlp.experts." in name]
        assert len(set(experts)) == len(experts) == LAYERS * EXPERTS * 3


@pytest.mark.parametrize(("layout", "groups"), [("ep2", 1), ("tp2_ep2_etp1", 1), ("tp2_ep2", 2)])
def test_a_layers_matrix_of_all_experts_takes_one_gather_in_each_group(exports, layout, groups):
    ranks = 2
    # mbridge gathers each expert of a rank, then each that came over expert tensor parallelism
    of_mbridge = EXPERTS // ranks if groups == 1 else EXPERTS // ranks + EXPERTS
    for rank in exports[layout]:
        spared = rank["mbridge"]["gathers"] - rank["ours"]["gathers"]
        assert spared == LAYERS * 2 * (of_mbridge - groups)
