"""Turns that arrive together are prefilled together by the real server."""

import asyncio
import re
from itertools import accumulate
from pathlib import Path

import httpx

from retool_mcore.rollout.server import SglangServer
from tests.sglang_client import access


def test_second_turns_are_prefilled_together_and_sample_the_same(server: SglangServer):
    """24 responses end their first turns three steps apart, on the real engine."""
    prompts = [[10 + number, 3, 7 * number % 200 + 10, 5] for number in range(24)]
    firsts = [40 + 3 * number for number in range(24)]

    async def generate(client: httpx.AsyncClient, ids: list[list[int]], tokens: list[int]) -> list[list[int]]:
        sampling = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": each} for each in tokens]
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        answer = await client.post("/generate", json=body)
        return [each["output_ids"] for each in answer.raise_for_status().json()]

    async def respond(client: httpx.AsyncClient, prompts: list[list[int]], firsts: list[int]) -> list[list[list[int]]]:
        responses = await generate(client, prompts, firsts)
        contexts = [[*prompt, *first, 50, 51] for prompt, first in zip(prompts, responses, strict=True)]
        after = await generate(client, contexts, [30] * len(prompts))
        return [[*each] for each in zip(responses, after, strict=True)]

    async def play() -> tuple[list[list[list[int]]], list[int], list[list[list[int]]]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(**access(server), limits=limits) as client:
            await generate(client, prompts[:1], [1])  # behind it no request of /health is left: each is prefilled, too
            before = len(prefills(server.log_path))
            each_alone = (respond(client, [prompt], [first]) for prompt, first in zip(prompts, firsts, strict=True))
            responses = [response for [response] in await asyncio.gather(*each_alone)]
            return responses, prefills(server.log_path)[before:], await respond(client, prompts, firsts)

    responses, sizes, in_one_request = asyncio.run(play())
    assert responses == in_one_request
    assert sum(sizes) == 48
    seconds = [size for size, done in zip(sizes, accumulate(sizes), strict=True) if done > 24]
    assert len(seconds) <= 14, "8 of second turns, or 24 where each has one of its own"


def prefills(log: Path) -> list[int]:
    """Requests of each prefill in the server's log."""
    return [int(each) for each in re.findall(r"Prefill batch.*?#new-seq: (\d+)", log.read_text(encoding="utf-8"))]
