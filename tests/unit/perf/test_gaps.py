"""perf/gaps.py: what the device waited for, told from the events of a trace."""

import gc
import gzip
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.platforms.base import get_platform

PERF = Path(__file__).parents[3] / "perf"
MAIN, AUTOGRAD = 7, 8  # threads of process 7


def _imported(name: str) -> Any:
    sys.path.insert(0, str(PERF))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PERF))


@pytest.fixture(scope="module")
def gaps() -> Any:
    return _imported("gaps")


@pytest.fixture(scope="module")
def kernels() -> Any:
    return _imported("kernels")


def kernel(start: float, end: float, launch: int = 0, stream: int = 1, cat: str = "kernel") -> dict[str, Any]:
    args = {"correlation": launch, "stream": stream}
    return {
        "ph": "X",
        "cat": cat,
        "name": "nvjet",
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def host(cat: str, name: str, start: float, end: float, *, launch: int = -1, thread: int = MAIN) -> dict[str, Any]:
    event = {"ph": "X", "cat": cat, "name": name, "pid": MAIN, "tid": thread, "ts": start, "dur": end - start}
    return event | {"args": {"correlation": launch}}


def call(name: str, start: float, end: float, launch: int = -1, thread: int = MAIN) -> dict[str, Any]:
    return host("cuda_runtime", name, start, end, launch=launch, thread=thread)


def told(gaps: Any, *events: dict[str, Any]) -> list[tuple[float, float, str]]:
    return [(gap.start, gap.end, gap.cause) for gap in gaps.gaps(events)]


def test_kernels_of_several_streams_leave_a_gap_only_where_none_runs(gaps: Any):
    running = [kernel(0, 40), kernel(10, 20, stream=2), kernel(35, 60, stream=2, cat="gpu_memcpy"), kernel(60, 70)]
    assert told(gaps, *running) == []
    projected = kernel(0, 100, cat="gpu_user_annotation")  # torch draws a range of the host there, nothing runs
    assert told(gaps, *running, kernel(90, 95), projected) == [(70, 90, "launch not recorded")]


def test_a_kernel_that_was_queued_waited_for_the_device(gaps: Any):
    queued = [kernel(0, 100), kernel(103, 200, 1), kernel(210, 220, 2, stream=2), kernel(280, 290, 3, stream=2)]
    launches = [call("cudaLaunchKernel", 10, 15, 1), host("cuda_driver", "cuLaunchKernelEx", 20, 25, launch=2)]
    launches.append(call("cudaLaunchKernel", 30, 35, 3))
    assert told(gaps, *queued, *launches) == [
        (100, 103, "device: the next kernel of the stream, queued"),
        (200, 210, "device: a kernel of another stream, queued"),
        (220, 280, "device: the next kernel of the stream, queued (nvjet)"),
    ]


def test_the_outer_one_of_two_calls_of_a_launch_counts(gaps: Any):
    launches = [call("cudaLaunchKernel", 90, 104, 1), host("cuda_driver", "cuLaunchKernel", 91, 99, launch=1)]
    for events in (launches, launches[::-1]):
        assert told(gaps, kernel(0, 100), kernel(105, 200, 1), *events) == [(100, 105, "host before nvjet")]


def test_a_wait_for_the_device_that_lasts_into_the_gap_is_the_cause(gaps: Any):
    waits = [
        host("cpu_op", "aten::item", 10, 140),
        host("cpu_op", "aten::_local_scalar_dense", 11, 139),
        call("cudaStreamSynchronize", 20, 138),
    ]
    launch = [host("cpu_op", "aten::add", 141, 150), call("cudaLaunchKernel", 144, 149, 1)]
    found = told(gaps, kernel(0, 100), kernel(152, 160, 1), *waits, *launch)
    assert found == [(100, 152, "cudaStreamSynchronize in aten::item")]


def test_after_a_wait_what_the_host_did_until_the_launch_is_the_cause(gaps: Any):
    waits = [host("cpu_op", "aten::item", 10, 108), call("cudaStreamSynchronize", 20, 107)]
    running = [kernel(0, 100), kernel(910, 920, 1)]
    launch = [host("cpu_op", "aten::add", 890, 910), call("cudaLaunchKernel", 900, 905, 1)]
    after = "after cudaStreamSynchronize in aten::item"
    assert told(gaps, *running, *waits, *launch) == [(100, 910, f"python before aten::add, {after}")]
    copies = [host("cpu_op", "aten::to", 200, 800), host("cpu_op", "aten::copy_", 300, 700)]
    assert told(gaps, *running, *waits, *copies, *launch) == [(100, 910, f"aten::to, {after}")]
    small = [host("cpu_op", f"aten::{index}", 100 + index, 199 + index) for index in range(100, 800, 100)]
    assert told(gaps, *running, *waits, *small, *launch) == [(100, 910, f"several ops, {after}")]


def test_a_call_that_takes_long_is_the_cause_and_a_usual_one_is_its_ops(gaps: Any):
    running = [kernel(0, 100), kernel(910, 920, 1)]
    op, launch = host("cpu_op", "aten::mm", 50, 906), call("cudaLaunchKernel", 900, 905, 1)
    assert told(gaps, *running, op, launch) == [(100, 910, "aten::mm")]
    for name in ("cudaMalloc", "cuMemMap", "cudaLaunchKernel"):
        assert told(gaps, *running, op, launch, call(name, 110, 890)) == [(100, 910, f"{name} in aten::mm")]
    queueing = [call("cudaEventRecord", start, start + 30) for start in range(110, 890, 30)]
    assert told(gaps, *running, op, launch, *queueing) == [(100, 910, "aten::mm")]


def test_a_short_allocation_is_a_cause_of_a_short_gap(gaps: Any):
    # One op calls the other at once: by the clock they start together.
    around = [host("cpu_op", "aten::addmm_", 90, 131), host("cpu_op", "aten::mm", 90, 140)]
    allocates = [call("cudaMalloc", 101, 125), call("cudaLaunchKernel", 126, 130, 1)]
    found = told(gaps, kernel(0, 100), kernel(132, 140, 1), *around, *allocates)
    assert found == [(100, 132, "cudaMalloc in aten::mm")]


def test_what_the_host_does_after_the_launch_is_no_cause(gaps: Any):
    later = [call("cudaLaunchKernel", 110, 115, 1), host("cpu_op", "aten::mm", 116, 190)]
    assert told(gaps, kernel(0, 100), kernel(190, 200, 1), *later) == [(100, 190, "python before nvjet")]


def test_the_profilers_own_time_is_told_from_the_hosts(gaps: Any):
    slow = [host("cpu_op", "aten::mm", 90, 906), call("cudaLaunchKernel", 95, 905, 1)]
    running = [kernel(0, 100), kernel(910, 920, 1)]
    own = host("overhead", "Activity Buffer Request", 150, 850, thread=0)
    full = own | {"name": "Command Buffer Full"}  # the device's queue, and no cost of recording
    assert told(gaps, *running, *slow, own) == [(100, 910, "the profiler itself")]
    for other in (full, own | {"dur": 300}):
        assert told(gaps, *running, *slow, other) == [(100, 910, "cudaLaunchKernel in aten::mm")]


def test_garbage_collection_is_named_within_whatever_it_interrupted(gaps: Any):
    events = [
        *(kernel(0, 100), kernel(910, 920, 1), call("cudaLaunchKernel", 900, 905, 1)),
        *(host("user_annotation", "optimizer", 50, 950), host("cpu_op", "aten::mm", 90, 906)),
        host("user_annotation", "garbage collection, generation 2", 150, 850),
    ]
    assert told(gaps, *events) == [(100, 910, "optimizer: garbage collection, generation 2")]


@pytest.mark.parametrize(
    ("start", "where"),
    [
        (100, "before packing"),
        (1100, "packing"),
        (2100, "before optimizer"),
        (3100, "optimizer"),
        (4100, "after optimizer"),
    ],
)
def test_the_phase_is_the_outermost_range_of_the_main_thread(gaps: Any, start: float, where: str):
    ranges = [
        host("user_annotation", "packing", 1000, 2000),
        host("user_annotation", "gradients", 1100, 1900),
        host("user_annotation", "nccl:all_reduce", 2050, 2400),
        host("user_annotation", "Optimizer.zero_grad#FusedAdam.zero_grad", 2400, 2900),
        host("user_annotation", "optimizer", 3000, 4000),
        host("user_annotation", "garbage collection, generation 0", 4050, 4060),
        host("user_annotation", "of another thread", 0, 5000, thread=AUTOGRAD),
    ]
    launch = call("cudaLaunchKernel", start + 90, start + 95, 1)
    found = told(gaps, kernel(0, start), kernel(start + 99, start + 200, 1), launch, *ranges)
    assert found == [(start, start + 99, f"{where}: host before nvjet")]


def test_phases_of_one_name_are_numbered(gaps: Any):
    """The first micro-batch starts with an empty queue, the others do not."""
    ranges, launches, device = [], [], [kernel(0, 100)]
    for number, start in enumerate((100, 300, 500), 1):
        ranges.append(host("user_annotation", "forward", start + 20, start + 120))
        for order, at in enumerate((start + 10, start + 90), 1):  # before the range, and within it
            launches.append(call("cudaLaunchKernel", at, at + 4, 10 * number + order))
        device += [kernel(start + 15, start + 40, 10 * number + 1), kernel(start + 95, start + 200, 10 * number + 2)]
    found = [(gap.start, gap.phase) for gap in gaps.gaps([*device, *launches, *ranges])]
    assert found == [
        *((100, "before forward 1"), (140, "forward 1")),
        *((300, "before forward 2"), (340, "forward 2")),
        *((500, "before forward 3"), (540, "forward 3")),
    ]


def test_a_gap_of_the_devices_own_has_no_phase_of_the_host(gaps: Any):
    queued = [kernel(0, 100), kernel(103, 200, 1), call("cudaLaunchKernel", 50, 60, 1)]
    assert [gap.phase for gap in gaps.gaps(queued)] == ["device"]
    assert [gap.phase for gap in gaps.gaps([kernel(0, 100), kernel(103, 200, 1)])] == ["launch not recorded"]
    starved = [kernel(0, 100), kernel(190, 200, 1), call("cudaLaunchKernel", 150, 160, 1)]
    assert [gap.phase for gap in gaps.gaps(starved)] == ["no phase"]


def test_while_autograds_thread_waits_the_main_thread_is_asked(gaps: Any):
    events = [
        *(kernel(0, 100), kernel(910, 920, 1)),
        host("cpu_op", "autograd::engine::evaluate_function: MulBackward", 890, 930, thread=AUTOGRAD),
        call("cudaLaunchKernel", 900, 905, 1, AUTOGRAD),
        *(host("user_annotation", "loss", 20, 850), host("user_annotation", "backward", 860, 940)),
        *(host("cpu_op", "aten::item", 30, 840), call("cudaMemcpyAsync", 40, 830)),
        call("cudaEventQuery", 0, 1000, thread=9),  # NCCL's watchdog has no part in it
    ]
    assert told(gaps, *events) == [(100, 910, "loss: cudaMemcpyAsync in aten::item")]
    events[2]["ts"] = events[2]["ts"] - 700  # the whole gap in autograd's thread
    events[2]["dur"] += 700
    assert told(gaps, *events) == [(100, 910, "loss: MulBackward, after cudaMemcpyAsync in aten::item")]


def test_causes_and_sizes_are_told_largest_first(gaps: Any):
    found = [
        *(gaps.Gap(0, 4, "a", "p 1"), gaps.Gap(10, 15, "b", "p 2")),
        *(gaps.Gap(20, 1020, "c", "device"), gaps.Gap(2000, 2049, "a", "p 2")),
    ]
    assert gaps.summarize_gaps(found) == {
        "gaps": [
            {"cause": "c", "seconds": 0.001, "count": 1},
            {"cause": "a", "seconds": 0.000053, "count": 2},
            {"cause": "b", "seconds": 0.000005, "count": 1},
        ],
        "gap_phases": [
            {"phase": "device", "seconds": 0.001, "count": 1},
            {"phase": "p 2", "seconds": 0.000054, "count": 2},
            {"phase": "p 1", "seconds": 0.000004, "count": 1},
        ],
        "gap_sizes": [
            {"size": "under 5 us", "seconds": 0.000004, "count": 1},
            {"size": "5 to 50 us", "seconds": 0.000054, "count": 2},
            {"size": "50 us to 1 ms", "seconds": 0.0, "count": 0},
            {"size": "over 1 ms", "seconds": 0.001, "count": 1},
        ],
    }


TIMES = st.tuples(st.integers(0, 300), st.integers(1, 60))


@given(st.lists(st.tuples(TIMES, TIMES, st.sampled_from([1, 2]), st.sampled_from([MAIN, AUTOGRAD])), min_size=1))
def test_causes_and_sizes_add_up_to_the_gaps(gaps: Any, kernels: Any, launched: list[Any]):
    events = []
    for number, ((start, took), (at, lasts), stream, thread) in enumerate(launched):
        events.append(kernel(start, start + took, number, stream))
        events.append(call("cudaLaunchKernel", at, at + lasts, number, thread))
    ran = list(kernels.kernels_of(events))
    expected = kernels.shares(ran, min(start for _, start, _ in ran), max(end for *_, end in ran))["gaps"]
    found = gaps.summarize_gaps(gaps.gaps(events))
    for table in found.values():
        assert sum(row["seconds"] for row in table) == pytest.approx(expected, abs=1e-5)


def test_causes_past_the_first_twelve_are_one_line(gaps: Any):
    table = gaps.summarize_gaps([gaps.Gap(0, 100 - index, f"cause {index}", "") for index in range(15)])["gaps"]
    assert len(gaps.summarize_gaps([gaps.Gap(0, 9, f"cause {index}", "") for index in range(15)], top=3)["gaps"]) == 4
    assert [row["cause"] for row in table[:12]] == [f"cause {index}" for index in range(12)]
    assert table[12:] == [{"cause": "others (3)", "seconds": 0.000261, "count": 3}]


def test_a_recording_without_a_device_has_no_gaps_but_names_its_ranges(kernels: Any, gaps: Any, tmp_path: Path):
    trace = tmp_path / "step.json.gz"
    recorder = kernels.Recorder(get_platform("cpu"), trace, kernels.named_garbage)
    with recorder:
        kernels.as_range("packing", torch.ones)(3)
        gc.collect()
    assert not gc.callbacks or gc.callbacks[-1].__name__ != "collection"
    assert recorder.found == {}
    assert recorder.waits["gaps"] == [] and {row["count"] for row in recorder.waits["gap_sizes"]} == {0}
    with gzip.open(trace, "rt") as file:
        recorded = json.load(file)["traceEvents"]
    names = [event["name"] for event in recorded if event.get("cat") == "user_annotation"]
    assert "packing" in names and "garbage collection, generation 2" in names
    assert gaps.read_trace(trace) == recorded
