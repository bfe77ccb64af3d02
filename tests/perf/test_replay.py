"""perf/replay.py and perf/waves.py: a recorded step is sent to a server as the run sent it."""

import asyncio
import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.tool import CODE_END
from retool_mcore.errors import DataError
from retool_mcore.platforms.base import get_platform
from retool_mcore.platforms.call_end import TABLE

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "cluster.gpus_per_node=2",
    "rollout.engine_tp=1",
    "train.prompts_per_step=8",
    "train.mini_batch_prompts=8",
    "rollout.group_size=4",
)


@pytest.fixture(scope="module")
def perf() -> Any:
    sys.path.insert(0, str(ROOT / "perf"))
    try:
        names = ("replay", "waves", "engine_bench", "bench")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(ROOT / "perf"))


def row(step: int, uid: str, **fields: Any) -> dict[str, Any]:
    """A response of 3 tokens, a result of 2 after 0.5 s, and 4 tokens."""
    turns = [{"start": 0, "tokens": 3, "tool_s": 0.5}, {"start": 5, "tokens": 4, "tool_s": 0.0}]
    of_row = {"key": f"{uid}_0_0", "step": step, "partition": "train", "drop_error": None, "turns": turns}
    return {**of_row, "prompt_ids": [1, 2], "response_ids": [11, 12, 13, 21, 22, 14, 15, 16, 17], **fields}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two of each step's groups are on record, and one of a validation; a last line is cut."""
    config = load_config(RlConfig, ROOT / "configs" / "rl_qwen2.5_7b_h200x8.toml", SETTINGS)
    (tmp_path / "config.toml").write_text(config.to_toml())
    rows = [row(step, f"{step}-{group}") for step in (1, 2, 3) for group in (0, 1)]
    rows += [row(2, "2-9", partition="val"), row(2, "2-1", drop_error="sandbox"), row(2, "2-8", turns=[])]
    (tmp_path / "trajectories").mkdir()
    lines = [json.dumps(each) + "\n" for each in rows]
    (tmp_path / "trajectories" / "trajectories.1.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "trajectories" / "trajectories.jsonl").write_text("".join(lines[2:]) + '{"key": "3-1_1')
    spent = {"time_generation_s": 4.0, "time_tool_wait_s": 1.0, "behavior/engine_s": 3.0}
    said = {"behavior/model_tokens": 100.0, "behavior/turns": 2.5}
    metrics = [{"step": 2, "val/accuracy": 0.5}, {"step": 2, **spent, **said}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    return tmp_path


def test_a_recorded_response_keeps_its_turns_results_and_pauses(perf: Any):
    response = perf.replay.response_of(row(1, "1-0"))
    turns = (perf.waves.Turn(3, 0.5, (21, 22)), perf.waves.Turn(4))
    assert response == perf.waves.Response((1, 2), turns)


def test_groups_of_the_nearest_steps_stand_for_those_that_are_not_on_record(perf: Any, run: Path):
    recorded = perf.replay.Recorded(run)
    assert {step: len(groups) for step, groups in recorded.groups.items()} == {1: 2, 2: 2, 3: 2}
    responses, others = recorded.of_step(3, 3)
    assert (len(responses), others) == (3, 1)
    with pytest.raises(DataError, match=r"recorded 6 groups of training, and 7 are asked for.*--groups"):
        recorded.of_step(3, 7)
    assert recorded.last_step() == 3


def test_the_runs_own_speed_is_an_engines_share_of_the_step(perf: Any, run: Path):
    """8 prompts of 4 responses on two engines: 16 responses of 100 tokens and 2.5 turns each."""
    recorded = perf.replay.Recorded(run)
    waited, alone = recorded.speed(2, pauses=True), recorded.speed(2, pauses=False)
    assert (waited["seconds"], waited["tokens_per_s"], waited["requests_per_s"]) == (5.0, 320.0, 8.0)
    assert (alone["seconds"], alone["tokens_per_s"], alone["requests_per_s"]) == (4.0, 400.0, 10.0)
    with pytest.raises(DataError, match="no step 3"):
        recorded.speed(3, pauses=True)


def test_a_benchmark_keeps_what_a_replay_reads(perf: Any, run: Path, tmp_path: Path):
    """Its own folder is gone when it ends."""
    perf.bench.keep_run(run, tmp_path / "kept" / "run")
    kept = perf.replay.Recorded(tmp_path / "kept" / "run")
    assert kept.of_step(2, 6) == perf.replay.Recorded(run).of_step(2, 6)
    assert kept.speed(2, pauses=True)["seconds"] == 5.0
    perf.bench.keep_run(tmp_path / "died at its start", tmp_path / "kept" / "nothing")


class Server:
    """Answers as SGLang does: as many tokens as asked for, or what ``says`` has for the context."""

    def __init__(self, says: dict[int, list[int]] | None = None) -> None:
        self.says = says or {}
        self.bodies: list[dict[str, Any]] = []
        self.flushed = self.running = self.most_running = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        context, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids = self.says.get(len(context), [90] * most)
        meta = {"prompt_tokens": len(context), "cached_tokens": len(context) - 1, "spec_verify_ct": 2}
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def flush(self, request: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response(text="Cache flushed.")

    def play(self, what: Any) -> Any:
        async def served() -> Any:
            app = web.Application()
            app.add_routes([web.post("/generate", self.generate), web.post("/flush_cache", self.flush)])
            async with TestServer(app) as server:
                return await what(str(server.make_url("")).rstrip("/"))

        return asyncio.run(served())


def test_a_wave_sends_each_turn_with_what_was_sampled_and_what_was_told(perf: Any):
    waves, server = perf.waves, Server()
    response = perf.replay.response_of(row(1, "1-0"))
    started = time.perf_counter()
    played = server.play(lambda url: waves.play(waves.Asked(url=url, in_flight=2), [response] * 3))
    assert time.perf_counter() - started > 1.0  # two pauses of 0.5 s one after the other, as 2 run at a time
    assert server.most_running == 2
    assert [body["input_ids"] for body in server.bodies if len(body["input_ids"]) > 2] == [
        [1, 2, 90, 90, 90, 21, 22]
    ] * 3
    counts = sorted(body["sampling_params"]["max_new_tokens"] for body in server.bodies)
    assert counts == [3, 3, 3, 4, 4, 4]
    assert all(body["sampling_params"]["ignore_eos"] and body["return_logprob"] for body in server.bodies)
    told = played.told()
    assert (told["requests"], told["tokens"]) == (6, 21)
    assert told["accepted_length"] == 1.75  # 21 tokens in 6 x 2 steps
    assert told["cached_fraction"] == round((3 * 1 + 3 * 6) / (3 * 2 + 3 * 7), 4)


def test_without_pauses_the_next_turn_follows_at_once(perf: Any):
    waves, server = perf.waves, Server()
    turns = [{"start": 0, "tokens": 3, "tool_s": 60.0}, {"start": 5, "tokens": 4, "tool_s": 0.0}]
    response = perf.replay.response_of(row(1, "1-0", turns=turns))
    asked = waves.Asked(url="", in_flight=1, pauses=False)
    played = server.play(lambda url: waves.play(replace(asked, url=url), [response]))
    assert played.requests == 2
    assert played.seconds < 30


def test_a_model_that_ends_its_turns_goes_on_only_after_a_call(perf: Any, merging_tokenizer, tmp_path: Path):
    """An answer in the first turn is the end; a call goes on, up to the turns on record."""
    merging_tokenizer.save_pretrained(tmp_path)
    config = load_config(
        RlConfig,
        ROOT / "configs" / "rl_qwen2.5_7b_h200x8.toml",
        [*SETTINGS, "rollout.protocol=retool", "rollout.max_response_tokens=50", f"model.path={tmp_path}"],
    )
    ends = perf.replay.ends_of(config, tmp_path)
    call = merging_tokenizer.encode(f"<code>\n```python\nprint(1)\n```\n{CODE_END}", add_special_tokens=False)
    answer = [*merging_tokenizer.encode("<answer>\n1\n</answer>"), merging_tokenizer.eos_token_id]
    after = 2 + len(call) + 2
    waves, response = perf.waves, perf.replay.response_of(row(1, "1-0"))
    for first, requests in ((call, 2), (answer, 1)):
        server = Server({2: first, after: call})
        asked = waves.Asked(url="", in_flight=1, pauses=False, ends=ends)
        played = server.play(lambda url, asked=asked: waves.play(replace(asked, url=url), [response]))
        assert played.requests == requests
        sampling = server.bodies[-1]["sampling_params"]
        assert "ignore_eos" not in sampling
        assert set(ends.stop_token_ids) == set(sampling["stop_token_ids"])
        assert sampling["custom_params"][TABLE]
    assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 50


def test_each_measured_wave_finds_the_caches_empty(perf: Any, run: Path):
    """As after a weight sync; and it is compared with the run by tokens a second."""
    bench, server = perf.engine_bench, Server()
    work = bench.replayed(get_platform("cuda"), run, 2, None, pauses=False, natural=False, model=run)
    assert (len(work.responses()), work.settings["groups_of_other_steps"]) == (4, 2)  # an engine's 4 prompts
    assert (
        work.engine_args["mem_fraction_static"]
        == load_config(RlConfig, run / "config.toml").rollout.engine_memory_fraction
    )

    async def served(url: str) -> Any:
        work.asked = replace(work.asked, url=url)
        return await bench.measured(work, 2)

    found = server.play(served)
    assert server.flushed == 2
    assert len(server.bodies) == 3 * 4 * 2
    assert [each["requests"] for each in (found["warm_up"], *found["waves"])] == [8, 8, 8]
    middle = sum(found["tokens_per_s"]) / 2
    assert found["bare_over_run"] == pytest.approx(middle / 400.0, abs=0.01)


def test_a_wave_of_a_step_is_told_by_prefill_decoding_and_host(perf: Any):
    """The head after a pass's attention is of its stage, whatever runs before the next one."""
    spans = [
        ("embedding", 0.0, 1.0),
        ("_fwd_kernel", 1.0, 3.0),
        ("nvjet_head", 3.0, 6.0),
        ("_fwd_grouped_kernel_stage1", 10.0, 11.0),
        ("_fwd_kernel_stage2", 10.5, 12.0),
        ("nvjet_head", 12.0, 13.0),
    ]
    assert perf.engine_bench.by_stage(spans) == {"prefill": 6.0, "decode": 3.0, "host": 4.0}
    assert perf.engine_bench.by_stage([("flash_fwd", 0.0, 1.0)]) == {}
