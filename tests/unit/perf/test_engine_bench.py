"""perf/engine_bench.py: the requests that it sends, and what it makes of a trace."""

import asyncio
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from retool_mcore.platforms import get_platform


@pytest.fixture(scope="module")
def bench() -> Any:
    perf = str(Path(__file__).parents[3] / "perf")
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
    found = bench.time_shares(events)
    assert found["recorded_ms"] == 0.1
    told = {kind: share for kind, share in found["kinds"].items() if share}
    assert told == {"matrix products": 0.6, "attention": 0.2, "copies, sums": 0.1, "gaps": 0.1}
    assert found["kernels"] == {"nvjet_a": 0.6, "_fwd_grouped_kernel_stage1": 0.2, "Memcpy DtoH": 0.1}


def test_an_engine_in_fp8_gets_what_verl_gives_it(bench: Any):
    get_platform("cpu").activate()  # verl imports there
    options = bench.fp8_options()
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given["--quantization"] == "fp8"
    [(name, quantization)] = json.loads(given["--json-model-override-args"]).items()
    assert (name, quantization["weight_block_size"]) == ("quantization_config", [128, 128])


def test_an_argument_of_the_server_has_a_value_or_is_a_switch(bench: Any):
    assert bench.option("attention-backend=triton") == ["--attention-backend", "triton"]
    assert bench.option('cuda-graph-config={"a": "b=c"}') == ["--cuda-graph-config", '{"a": "b=c"}']
    assert bench.option("enable-prefill-delayer") == ["--enable-prefill-delayer"]


def test_each_wave_finds_the_caches_empty_and_counts_its_tokens(bench: Any):
    calls: list[Any] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        calls.append(body)
        await asyncio.sleep(0.01)
        return web.json_response({"output_ids": [90] * body["sampling_params"]["max_new_tokens"]})

    async def flush(request: web.Request) -> web.Response:
        calls.append("flush")
        return web.Response(text="Cache flushed.")

    async def served() -> Any:
        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.post("/flush_cache", flush)])
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            load = bench.Load(url, random.Random(0), 3, (5, 9), 7, 0.5)
            return await bench.measure_waves(load, 2)

    found = asyncio.run(served())
    assert [place for place, call in enumerate(calls) if call == "flush"] == [0, 4, 8]
    for number, wave in enumerate((found["warm_up"], *found["waves"])):
        bodies = calls[4 * number + 1 : 4 * number + 4]
        sampling = [body["sampling_params"] for body in bodies]
        lengths = [each["max_new_tokens"] for each in sampling]
        low, high = bench.WARM_UP if number == 0 else (5, 9)
        assert all(low <= length <= high for length in lengths)
        assert wave["tokens"] == sum(lengths)
        assert all(len(body["input_ids"]) == 7 and body["return_logprob"] for body in bodies)
        assert all(each["temperature"] == 0.5 and each["ignore_eos"] for each in sampling)
    assert found["tokens_per_s"] == [wave["tokens_per_s"] for wave in found["waves"]]
