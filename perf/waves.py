"""Waves of requests to a bare SGLang server: responses of one or more turns, many at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SEED = 1  # of each request; RL's have one too


@dataclass(frozen=True)
class Turn:
    """One request of so many tokens. ``told``: what follows them before the next turn."""

    tokens: int
    pause_s: float = 0.0
    told: tuple[int, ...] = ()


@dataclass(frozen=True)
class Response:
    """The next turn's request continues the prompt, the tokens sampled, and what was told."""

    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Where a model ends its turns. ``calls``: is a turn a call, so that another follows?"""

    stop_token_ids: tuple[int, ...]
    custom_params: Mapping[str, Any]
    max_response_tokens: int
    calls: Callable[[list[int]], bool]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How responses are asked for. ``ends``: None where each turn has the planned tokens."""

    url: str
    in_flight: int
    temperature: float = 1.0
    top_p: float = 1.0
    pauses: bool = True
    ends: Ends | None = None

    def body(self, context: list[int], most: int) -> dict[str, Any]:
        """Of a request for up to ``most`` tokens, with log-probabilities, as RL asks for them."""
        sampling = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1,
            "max_new_tokens": most,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": SEED,
        }
        if self.ends is None:
            sampling["ignore_eos"] = True
        else:
            sampling["stop_token_ids"] = list(self.ends.stop_token_ids)
            if self.ends.custom_params:
                sampling["custom_params"] = dict(self.ends.custom_params)
        return {"input_ids": context, "sampling_params": sampling, "return_logprob": True}


@dataclass
class Played:
    """A wave that is over. ``verified``: steps that checked drafts, summed over the requests.

    ``client_cpu_s``: of this process. Where it is near ``seconds``, not the server was measured.
    """

    seconds: float = 0.0
    client_cpu_s: float = 0.0
    requests: int = 0
    tokens: int = 0
    context_tokens: int = 0
    cached_tokens: int = 0
    verified: int = 0
    request_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def count(self, meta: Mapping[str, Any], sampled: int, took: float) -> None:
        self.requests += 1
        self.tokens += sampled
        self.context_tokens += meta["prompt_tokens"]
        self.cached_tokens += meta.get("cached_tokens") or 0
        self.verified += meta.get("spec_verify_ct") or 0
        self.request_s.append(took)

    def told(self) -> dict[str, Any]:
        """For the record; a drafting engine also tells its tokens for each step and sequence."""
        return {
            "seconds": round(self.seconds, 3),
            "client_cpu_s": round(self.client_cpu_s, 3),
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "requests_per_s": round(self.requests / self.seconds, 1),
            "request_s": round(sum(self.request_s) / self.requests, 3),
            "cached_fraction": round(self.cached_tokens / self.context_tokens, 4),
            **({"accepted_length": round(self.tokens / self.verified, 3)} if self.verified else {}),
        }


async def play(asked: Asked, responses: Sequence[Response]) -> Played:
    """All ``responses``, so many at a time, from the first request to the last answer."""
    played, slots = Played(), asyncio.Semaphore(asked.in_flight)
    async with session(asked.url) as client:

        async def one(response: Response) -> None:
            async with slots:
                await _respond(client, asked, response, played)

        started, spent = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for response in responses:
                tasks.create_task(one(response))
        played.seconds, played.client_cpu_s = time.perf_counter() - started, time.process_time() - spent
    return played


async def _respond(client: aiohttp.ClientSession, asked: Asked, response: Response, played: Played) -> None:
    context = list(response.prompt)
    for number, turn in enumerate(response.turns, 1):
        left = asked.ends.max_response_tokens - (len(context) - len(response.prompt)) if asked.ends else turn.tokens
        if left <= 0:
            return
        started = time.perf_counter()
        answer = await post(client, "/generate", asked.body(context, left))
        sampled: list[int] = answer["output_ids"]
        played.count(answer["meta_info"], len(sampled), time.perf_counter() - started)
        if number == len(response.turns) or (asked.ends and not asked.ends.calls(sampled)):
            return
        context = [*context, *sampled, *turn.told]
        if asked.pauses:
            await asyncio.sleep(turn.pause_s)


def session(url: str) -> aiohttp.ClientSession:
    """A client without limits. httpx looks through all its connections for each request."""
    connector, never = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(url, connector=connector, timeout=never, trust_env=False)


async def post(client: aiohttp.ClientSession, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """What the server answers, read as JSON where it is. Raises RuntimeError where it refuses."""
    async with client.post(path, json=body) as answer:
        if not answer.ok:
            raise RuntimeError(f"{path}: {answer.status} {(await answer.text())[:500]}")
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def flush(url: str) -> None:
    """Empty the server's caches, of prefixes and of drafts, as an update of the weights does."""
    async with session(url) as client:
        await post(client, "/flush_cache")


def planned(draw: random.Random, count: int, tokens: tuple[int, int], prompt_tokens: int) -> list[Response]:
    """Responses of one turn: prompts of random tokens, lengths drawn evenly."""
    lengths = [draw.randint(*tokens) for _ in range(count)]
    return [Response(tuple(draw.randrange(10, 800) for _ in range(prompt_tokens)), (Turn(n),)) for n in lengths]
