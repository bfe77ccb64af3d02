"""Requests to a server of SGLang: what is sent, what is read, and what is tried again."""

import json

import httpx
import pytest
from tenacity import wait_fixed

from retool_mcore.errors import RolloutError
from retool_mcore.rollout import sglang_http
from retool_mcore.rollout.engine import EngineTurn, EngineUnavailable, Sampling, TurnRequest, trajectory_seed
from retool_mcore.rollout.sglang_http import SglangEngine

META = {"finish_reason": {"type": "length"}, "prompt_tokens": 2, "cached_tokens": 1, "weight_version": "7"}
META |= {"output_token_logprobs": [[-0.5, 8, None], [-1.5, 9, None]]}


async def test_a_request_is_sent_whole_and_again_while_the_server_is_busy_or_gone(monkeypatch: pytest.MonkeyPatch):
    answers = [(0, "restarting")] * 2 + [(500, "busy")] * 7
    answers += [(200, json.dumps({"output_ids": [8, 9], "meta_info": META}))]
    answers += [(400, "too long"), (200, "hello"), *[(500, "busy")] * 99]
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        status, text = answers.pop(0)
        if not status:
            raise httpx.ConnectError(text)
        return httpx.Response(status, text=text)

    engine = SglangEngine("http://:KEY@127.0.0.1:1/", retry_s=3.0)
    monkeypatch.setattr(engine._client, "_transport", httpx.MockTransport(answer))
    monkeypatch.setattr(sglang_http, "BACKOFF", wait_fixed(0.05))
    sampling, limits = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"max_new_tokens": 30, "stop_token_ids": [6, 7]}
    seed = trajectory_seed(3, 5, 1)  # whose CRC-32 has 32 bits
    request = TurnRequest(token_ids=(4, 5), sampling=Sampling(seed=seed, **sampling), trajectory_id="t", **limits)
    turn = await engine.generate(request)
    params = {**sampling, **limits, "sampling_seed": 965776655, "skip_special_tokens": False, "no_stop_trim": True}
    assert json.loads(seen[-1].content) == {"input_ids": [4, 5], "sampling_params": params, "return_logprob": True}
    assert seen[-1].headers["Authorization"] == "Bearer KEY" and len(seen) == 10
    known = {"stop": "length", "version": 7, "context_tokens": 2, "cached_tokens": 1}
    assert turn == EngineTurn(token_ids=[8, 9], logprobs=[-0.5, -1.5], **known)
    engine.retry_s, errors = 0.2, list[tuple[type[Exception], str]]()
    for _ in range(3):
        with pytest.raises(RolloutError) as caught:
            await engine.generate(request)
        errors.append((caught.type, str(caught.value).removeprefix("http://127.0.0.1:1/generate ")))
    assert errors == [
        (RolloutError, "rejected the request: 400 too long"),
        (RolloutError, "is not an SGLang server: it returned 'hello'"),
        (EngineUnavailable, "failed for 0.2 s: status 500: busy"),
    ]
