"""Every layout over two processes trains like one process, which trains like plain transformers.

Real verl TrainingWorker, Megatron-core and gloo. Tolerances were measured once (2-core machine):
losses agree to 2e-6, gradient norms to 9e-6 of their value, against bounds of 1e-4 and 1e-4.
"""

import pytest

from tests.parity.megatron_ranks import MICRO_BATCH_TOKENS, launch_all, make_model
from tests.parity.plain_transformers import plain_transformers

TWO_PROCESSES = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "pp2_vpp2": {"pp": 2, "vpp": 2}, "cp2": {"cp": 2}, "dp2": {}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FOUR_STEPS = [["train", 1, 4]]
KINDS = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
MORE = {  # job -> kind and layout
    "qwen3_tp2": ("qwen3", {"tp": 2}),
    **{f"qwen3_5_text_{way}2": ("qwen3_5_text", {way: 2}) for way in ("tp", "pp", "cp")},
    "qwen3_5_moe_text_tp2": ("qwen3_5_moe_text", {"tp": 2}),
    "qwen3_5_moe_text_ep2": ("qwen3_5_moe_text", {"ep": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: str(make_model(folder / kind, kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """Job name -> loss, grad_norm and lr of four steps."""
    folder = tmp_path_factory.mktemp("parity")

    def job(name, kind="qwen2", **settings):
        return {"name": name, "model": models[kind], "actions": FOUR_STEPS, **settings}

    one = [job("one"), job("padded", packed=False), job("recompute", transformer=RECOMPUTE)]
    one += [job("recompute_auto", recompute_above=MICRO_BATCH_TOKENS // 2)]
    one += [job(f"{kind}_one", kind) for kind in KINDS[1:]]
    one += [job("qwen3_5_text_padded", "qwen3_5_text", packed=False)]
    one += [job("fused", fused=True)]  # platform cuda's fused cross-entropy, on twins of its kernels
    two = [job("tp2_fused", fused=True, layout={"tp": 2})]
    two += [job(name, layout=layout) for name, layout in TWO_PROCESSES.items()]
    two += [job("pp2_vpp2_auto", layout=TWO_PROCESSES["pp2_vpp2"], recompute_above=MICRO_BATCH_TOKENS // 2)]
    two += [job("tp2_no_sp", layout={"tp": 2}, transformer={"sequence_parallel": False})]
    two += [job(name, kind, layout=layout) for name, (kind, layout) in MORE.items()]
    return {name: answers[0] for name, answers in launch_all({1: one, 2: two}, folder).items()}


def column(steps, name):
    return [step[name] for step in steps]


def assert_alike(run: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert column(run, "loss") == pytest.approx(column(other, "loss"), abs=1e-4)
    assert column(run, "grad_norm") == pytest.approx(column(other, "grad_norm"), rel=1e-4)
    assert column(run, "lr") == column(other, "lr")


COMPARED = {"qwen3_5_moe_text": 3}  # kind -> steps; later, rounding sends tokens to other experts
ALIKE = ("pp2_vpp2_auto", "tp2_no_sp", "padded", "recompute", "recompute_auto", "fused", "tp2_fused")


@pytest.mark.parametrize("name", [*TWO_PROCESSES, *ALIKE, *MORE])
def test_every_layout_trains_like_one_process(runs, name):
    """With query and key norms, and with Gated DeltaNet layers, too."""
    kind, _ = MORE.get(name, ("qwen2", {}))
    steps = COMPARED.get(kind, 4)
    assert_alike(runs[name][:steps], runs["one" if kind == "qwen2" else f"{kind}_one"][:steps])


ONE = [("one", "qwen2"), *((f"{kind}_one", kind) for kind in KINDS[1:]), ("qwen3_5_text_padded", "qwen3_5_text")]


@pytest.mark.parametrize(("name", "kind"), ONE)
def test_one_process_trains_like_plain_transformers(runs, models, name, kind):
    found = runs[name][: COMPARED.get(kind, 4)]
    want = plain_transformers(models[kind], lrs=[0.0, *column(found, "lr")[:-1]])
    assert column(found, "loss")[0] == pytest.approx(want[0][0], abs=1e-5)
    assert column(found, "loss") == pytest.approx([loss for loss, _ in want], abs=1e-4)
    assert column(found, "grad_norm") == pytest.approx([norm for _, norm in want], rel=1e-4)
