"""The loop against the real SGLang server, with a scripted and with a random model."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import psutil
import pytest
import torch

from retool_mcore.data.task_model import write_model
from retool_mcore.errors import RolloutError
from retool_mcore.rollout.engine import EngineUnavailable, Sampling, TurnRequest
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import Hermes, Retool
from retool_mcore.rollout.server import SglangServer
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.sandbox import open_sandbox
from tests.engine.scripted_server import PlannedEngine, make_plan
from tests.sglang_client import access
from tests.sockets import listening
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import roll_out

QUESTION = [{"role": "user", "content": "What is the sum of the integers from 412 to 967, inclusive?"}]
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(sum(range(412, 968)))"}}\n</tool_call>'


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


async def test_a_call_is_intercepted_on_its_last_token_and_the_answer_follows(server, tokenizer):
    hermes = Hermes(tokenizer)
    prompt = hermes.prompt_ids(QUESTION)
    turns = [f"I add them up.\n{CALL}", "It is \\boxed{383362}.<|im_end|>"]
    plan = make_plan(hermes, turns, ["383362"])
    async with (
        PlannedEngine(server.url, len(prompt), plan) as engine,
        open_sandbox("local", min_level="rlimits") as sandbox,
    ):
        trajectory = await roll_out(prompt, engine, sandbox, hermes, limits_for(max_response_tokens=400))
    ledger = trajectory.ledger
    call_turn, answer_turn = (ids_of(tokenizer, text) for text in turns)
    between = len(plan) - len(call_turn) - len(answer_turn)
    assert ledger.response_ids == plan
    assert ledger.loss_mask == [1] * len(call_turn) + [0] * between + [1] * len(answer_turn)
    assert trajectory.stop_reason == StopReason.FINISHED
    assert trajectory.answer == "383362"
    assert [result.shown for turn in trajectory.turns for result in turn.results] == ["383362"]


async def test_the_papers_form_stops_on_the_token_that_completes_its_tag(server, tokenizer):
    retool = Retool(tokenizer)
    prompt = retool.prompt_ids(QUESTION)
    turns = [
        "I count.\n<code>\n```python\nif 2 > 1:\n    print(sum(range(412, 968)))\n```\n</code>",
        "<answer>\n\\boxed{383362}\n</answer><|im_end|>",
    ]
    plan = make_plan(retool, turns, ["383362"])
    async with (
        PlannedEngine(server.url, len(prompt), plan) as engine,
        open_sandbox("local", min_level="rlimits") as sandbox,
    ):
        trajectory = await roll_out(prompt, engine, sandbox, retool, limits_for(max_response_tokens=400))
        requests = engine.turns
    assert trajectory.ledger.response_ids == plan
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, "383362")
    assert len(trajectory.turns) == 2
    assert requests == 2, "the comparison and the other tags only looked like the end of the call"


@pytest.mark.parametrize("known", [True, False])
async def test_a_tag_that_an_abort_cut_in_two_ends_the_turn(server, tokenizer, known: bool):
    """Requests of the same turn, the second of which has the start of the tag in its prompt."""
    retool = Retool(tokenizer)
    prompt = retool.prompt_ids(QUESTION)
    plan = ids_of(tokenizer, "<b> if x > 3:\n</code> and so on")
    end = next(end for end in range(1, len(plan)) if "</code>" in tokenizer.decode(plan[:end]))
    for cut in range(1, end):
        async with PlannedEngine(server.url, len(prompt), plan) as engine:
            turn = await engine.generate(
                TurnRequest(
                    token_ids=[*prompt, *plan[:cut]],
                    max_new_tokens=len(plan) - cut,
                    stop_token_ids=retool.stop_token_ids,
                    sampling=Sampling(),
                    trajectory_id="x",
                    call_end=retool.call_end if known else None,
                    turn_tokens=cut,
                )
            )
        first = next(at for at in range(cut, end) if plan[at] in retool.stop_token_ids) + 1
        assert (turn.stop, list(turn.token_ids)) == ("stop", plan[cut : end if known else first])


class Biased(SglangEngine):
    """Samples tokens that look like the end of a call; ``asks``: send the tag, too."""

    def __init__(self, url: str, token_ids: list[int], *, asks: bool) -> None:
        super().__init__(url)
        self.bias, self.asks = {str(token_id): 4.0 for token_id in token_ids}, asks

    def body(self, request: TurnRequest) -> dict[str, Any]:
        body = super().body(request if self.asks else replace(request, call_end=None))
        body["sampling_params"]["logit_bias"] = self.bias
        return body


@pytest.mark.long
async def test_a_turn_is_one_request_and_has_the_tokens_of_many(server, tokenizer):
    """A random model that likes to begin, end and feign calls: with one request a turn, and with
    one for each token at which the engine could stop.
    """
    retool = Retool(tokenizer)
    likes = sorted({*ids_of(tokenizer, "</code>"), *ids_of(tokenizer, "<code>"), *ids_of(tokenizer, ">\n")})
    prompt = retool.prompt_ids(QUESTION)

    async def sampled(*, asks: bool) -> list[Trajectory]:
        async with Biased(server.url, likes, asks=asks) as engine, open_sandbox("local", min_level="rlimits") as box:
            limits = limits_for(max_response_tokens=120, max_malformed_calls=100, max_turns=100)
            return await asyncio.gather(
                *(
                    roll_out(prompt, engine, box, retool, limits, sampling=Sampling(seed=i), trajectory_id=f"b{i}")
                    for i in range(16)
                )
            )

    one, many = await sampled(asks=True), await sampled(asks=False)
    assert [each.ledger.response_ids for each in one] == [each.ledger.response_ids for each in many]
    for here, there in zip(one, many, strict=True):
        assert here.ledger.loss_mask == there.ledger.loss_mask and here.stop_reason == there.stop_reason
        assert here.ledger.logprobs == pytest.approx(there.ledger.logprobs, abs=1e-4)
    turns = sum(len(each.turns) for each in one)
    assert sum(each.requests for each in one) == turns
    assert sum(each.requests for each in many) > 3 * turns


def plain_request(token_ids: list[int]) -> TurnRequest:
    return TurnRequest(
        token_ids=token_ids, max_new_tokens=2, stop_token_ids=[], sampling=Sampling(), trajectory_id="one"
    )


async def test_a_request_the_server_refuses_is_an_error_and_no_outage(server):
    async with SglangEngine(server.url, retry_s=5.0) as engine:
        with pytest.raises(RolloutError, match="rejected the request") as caught:
            await engine.generate(plain_request([1] * 4000))
    assert not isinstance(caught.value, EngineUnavailable)


@pytest.mark.long
def test_no_path_of_the_server_answers_without_its_key(server: SglangServer):
    """On each socket that speaks HTTP. SGLang leaves open only what monitors ask for."""
    with httpx.Client(**access(server)) as client:
        routes: dict[str, Any] = client.get("/openapi.json").raise_for_status().json()["paths"]
    asked = [(path, method) for path, methods in routes.items() for method in methods]
    closed = [each for each in asked if not each[0].startswith(("/health", "/metrics"))]
    assert ("/load_lora_adapter_from_tensors", "post") in closed, "it unpickles what it is sent"
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    answers: dict[str, set[int]] = {}
    for address in listening(process.pid for process in processes):
        with suppress(httpx.HTTPError), httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            answers[address] = {client.request(method, path).status_code for path, method in closed}
    assert answers == {f"127.0.0.1:{server.port}": {401}}


def test_no_other_user_can_read_the_servers_key(server: SglangServer):
    assert server.key not in " ".join(psutil.Process(server.pid).cmdline())
    assert server.key in server.log_path.read_text(encoding="utf-8"), "SGLang writes its arguments there"
    assert server.log_path.stat().st_mode & 0o077 == 0


async def test_replaced_weights_answer_as_a_model_of_their_own(server, model_dir, tokenizer, tmp_path):
    """Greedily, as transformers does with the same weights, and as before when they are back."""
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "other", tokenizer, seed=7)
    request = replace(plain_request([5, 6, 7, 8]), max_new_tokens=12, sampling=Sampling(temperature=0.0))

    def alone(folder) -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        ids = model.generate(torch.tensor([request.token_ids]), do_sample=False, max_new_tokens=12)
        return ids[0, len(request.token_ids) :].tolist()

    async with SglangEngine(server.url) as engine:
        seen = []
        for version, folder in enumerate((model_dir, tmp_path / "other", model_dir)):
            await engine.load(str(folder), version)
            assert (await engine.model_info())["model_path"] == str(folder)
            turn = await engine.generate(request)
            assert turn.version == version
            seen.append(turn.token_ids)
        with pytest.raises(RolloutError, match="rejected the request"):
            await engine.load(str(model_dir / "missing"))
    assert seen == [alone(model_dir), alone(tmp_path / "other"), seen[0]]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("healthy", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_owner_leaves_no_server_behind(model_dir, tmp_path, healthy: bool):
    code = f"""
        import time
        from pathlib import Path
        from retool_mcore.platforms.base import get_platform
        from retool_mcore.rollout.server import SglangServer
        options = dict(dtype="float32", log_path=Path("server.log"), max_running_requests=64)
        server = SglangServer({str(model_dir)!r}, get_platform("cpu"), **options)
        server.start()
        if {healthy}:
            server.wait_until_healthy()
        print(server.pid, flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    assert _group_lives(group)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while _group_lives(group):
        assert time.monotonic() < deadline, f"process group {group} still lives 30 s after its owner was killed"
        time.sleep(0.2)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
