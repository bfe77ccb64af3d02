"""Responses with look-alikes of a call's end, in SGLang's own record of a request."""

import asyncio
import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

STREAMS = 60
PIECES = ["<", "</", "code", "co", "de", ">", ">\n", "</code>", "a", "x = 3", " ", "`", "<code>", "\n", "```python\n"]


def response() -> str:
    """How long it is where SGLang stops on ">": after "x > 3", and of "</code>".

    And whether the request is freed when nobody holds it.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from retool_mcore.platforms.call_end import TABLE, CallEnd

    call_end = CallEnd.of({"</": 1, "code": 2, ">": 3, "x": 4}, "</code>")
    params = SamplingParams(stop_token_ids=[3], custom_params={TABLE: call_end.text})
    request = Req("0", "", [9], params)
    request.output_ids.extend([4, 3, 4, 1, 2, 3, 4])  # as a speculative step accepts them
    found = f"{request._check_token_based_finish(request.output_ids[:])}, {request.finished_len} tokens"
    alive = weakref.ref(request)
    gc.disable()
    del request
    freed = alive() is None
    gc.enable()
    return f"{found}, freed {freed}"


class Scheduled:
    """SGLang's ``Req`` as an engine: it is given a known stream of tokens, a few in each step.

    ``asks``: requests say how the end of a call is found, as to a server with our patch. Aborts
    come between two steps, at random. ``mentions``: tags of which only their text tells that they
    end no call.
    """

    def __init__(self, plan: Sequence[int], prompt_tokens: int, seed: int, *, asks: bool) -> None:
        self.plan, self.prompt_tokens, self.asks = plan, prompt_tokens, asks
        self.draw = random.Random(seed)
        self.requests = self.aborts = self.mentions = 0
        self.stopped = False

    async def generate(self, request: Any) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        from retool_mcore.rollout.engine import EngineTurn

        said = request.token_ids[len(request.token_ids) - request.turn_tokens :]
        self.mentions += self.stopped and bool(said) and request.call_end.complete(said)
        asked = request if self.asks else replace(request, call_end=None)
        params = SamplingParams(
            stop_token_ids=list(request.stop_token_ids),
            max_new_tokens=request.max_new_tokens,
            custom_params=asked.custom_params or None,
        )
        params.normalize(None)
        req = Req(str(self.requests), "", list(request.token_ids), params, vocab_size=1 << 20)
        self.requests += 1
        start = len(request.token_ids) - self.prompt_tokens
        reason, taken = "", 0
        while not reason:
            step = self.plan[start + taken : start + taken + self.draw.randint(1, 4)]
            taken += len(step)
            req.output_ids.extend(step)
            req.update_finish_state(len(step))
            if req.finished():
                reason = str(cast("Any", req.finished_reason).to_json()["type"])
            elif self.draw.random() < 0.03:
                reason = "abort"
                self.aborts += 1
        token_ids = list(req.output_ids[: req.finished_len or None])
        self.stopped = reason == "stop"
        logprobs = [-1e-3 * (start + at) for at in range(len(token_ids))]
        return EngineTurn(token_ids=token_ids, logprobs=logprobs, stop=reason, context_tokens=len(request.token_ids))


class Answers:
    """A sandbox that has run everything."""

    async def execute(self, code: str, **limits: Any) -> Any:
        from retool_mcore.sandbox.base import ExecResult

        return ExecResult(status="finished", return_code=0, stdout="1", stderr="")


def streams() -> str:
    """Random streams full of look-alikes: what the scheduler decides, and what the loop does."""
    from retool_mcore.data.task_model import build_tokenizer
    from retool_mcore.data.tasks import tokenizer_rows
    from retool_mcore.rollout.protocol import Retool

    protocol = Retool(build_tokenizer(tokenizer_rows()))
    same = one_each = spared = 0
    for number in range(STREAMS):
        draw = random.Random(number)
        pieces = draw.choices(PIECES, k=120)
        plan = [i for piece in pieces for i in protocol.tokenizer.encode(piece, add_special_tokens=False)]
        found = [asyncio.run(_trajectory(protocol, plan, number, asks=asks)) for asks in (True, False)]
        (here, engine), (there, loop) = found
        same += here == there
        one_each += engine.requests == here[-1] + engine.aborts + engine.mentions
        spared += loop.requests - engine.requests
    return f"{same} streams the same, {one_each} with one request a turn, {spared} requests spared"


async def _trajectory(protocol: Any, plan: Sequence[int], seed: int, *, asks: bool) -> tuple[tuple[Any, ...], Any]:
    """All of a trajectory that is trained on, and its turns; and the engine."""
    from retool_mcore.rollout.engine import Sampling
    from retool_mcore.rollout.loop import run_trajectory
    from tests.unit.rollout.budgets import limits

    prompt = [1, 2, 3]
    engine = Scheduled(plan, len(prompt), seed, asks=asks)
    done = await run_trajectory(
        prompt,
        engine=engine,
        sandbox=Answers(),  # type: ignore[arg-type]  # the loop uses only a sandbox's execute
        protocol=protocol,
        limits=limits(max_response_tokens=len(plan), max_turns=1000, max_malformed_calls=1000),
        sampling=Sampling(),
        trajectory_id="t",
    )
    ledger = done.ledger
    spans = [(span.role, span.start, span.end) for span in ledger.spans]
    return (ledger.response_ids, ledger.logprobs, ledger.loss_mask, spans, done.stop_reason, len(done.turns)), engine
