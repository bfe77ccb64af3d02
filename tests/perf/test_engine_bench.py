"""perf/engine_bench.py: what it makes of a trace."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.platforms import get_platform


@pytest.fixture(scope="module")
def bench() -> Any:
    perf = str(Path(__file__).parents[2] / "perf")
    sys.path.insert(0, perf)
    try:
        yield importlib.import_module("engine_bench")
    finally:
        sys.path.remove(perf)


def test_a_trace_is_told_by_kind_and_by_kernel(bench: Any):
    def event(name: str, start: float, took: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": took}

    events = [
        event("nvjet_a", 100.0, 50.0),
        event("_fwd_grouped_kernel_stage1", 150.0, 20.0),
        event("nvjet_a", 180.0, 10.0),
        event("Memcpy DtoH", 190.0, 10.0, "gpu_memcpy"),
        event("aten::mm", 0.0, 500.0, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = bench.where_time_goes(events)
    assert found["recorded_ms"] == 0.1
    told = {kind: share for kind, share in found["kinds"].items() if share}
    assert told == {"matrix products": 0.6, "attention": 0.2, "copies, sums": 0.1, "gaps": 0.1}
    assert found["kernels"] == {"nvjet_a": 0.6, "_fwd_grouped_kernel_stage1": 0.2, "Memcpy DtoH": 0.1}


def test_an_engine_in_fp8_gets_what_verl_gives_it(bench: Any):
    get_platform("cpu").activate()  # verl imports there
    options = bench.in_fp8()
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given["--quantization"] == "fp8"
    [(name, quantization)] = json.loads(given["--json-model-override-args"]).items()
    assert (name, quantization["weight_block_size"]) == ("quantization_config", [128, 128])


def test_an_argument_of_the_server_has_a_value_or_is_a_switch(bench: Any):
    assert bench.option("attention-backend=triton") == ["--attention-backend", "triton"]
    assert bench.option('cuda-graph-config={"a": "b=c"}') == ["--cuda-graph-config", '{"a": "b=c"}']
    assert bench.option("enable-prefill-delayer") == ["--enable-prefill-delayer"]
