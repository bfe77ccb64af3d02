"""perf/kernels.py: what a kernel is, and that kinds and gaps add up to the time."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

PERF = Path(__file__).parents[3] / "perf"


@pytest.fixture(scope="module")
def kernels() -> Any:
    sys.path.insert(0, str(PERF))
    try:
        return importlib.import_module("kernels")
    finally:
        sys.path.remove(str(PERF))


@pytest.mark.parametrize(  # names as an H200 gave them
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "messages"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<float>", "norms"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("online_softmax_kernel", "cross-entropy"),
        ("_permute_kernel", "experts' routing"),
        ("Memcpy DtoD (Device -> Device)", "copies, sums"),
        ("element_mul_kernel", "other"),
    ],
)
def test_a_kernels_kind(kernels: Any, name: str, kind: str):
    assert kernels.kind_of(name) == kind


def test_of_kernels_at_the_same_time_the_first_kind_counts(kernels: Any):
    found = kernels.shares([("ncclX", 3, 6), ("nvjet_a", 0, 4), ("weird", 8, 9)], 0, 10)
    assert {kind: seconds for kind, seconds in found.items() if seconds} == {
        "matrix products": 4.0,
        "messages": 2.0,
        "other": 1.0,
        "gaps": 3.0,
    }


SPANS = st.lists(st.tuples(st.sampled_from(["nvjet", "nccl", "flash", "?"]), st.integers(0, 50), st.integers(0, 50)))


@given(SPANS)
def test_kinds_and_gaps_add_up_to_the_time(kernels: Any, spans: list[tuple[str, int, int]]):
    found = kernels.shares(spans, 10, 40)
    assert sum(found.values()) == 30
    assert min(found.values()) >= 0
    busy = {at for _, start, end in spans for at in range(max(start, 10), min(end, 40))}
    assert found["gaps"] == 30 - len(busy)
