"""verl's SGLang server, which also reports its load and cache hits.

Import it through ``rl_metrics.measure_sglang``, which first has verl install what its SGLang
modules need.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5  # counts that SGLang keeps anyway; 0.5.14's are up to 15 decoding steps old
KINDS = ("running", "waiting")  # SGLang's names


class MeasuredServer(SGLangHttpServer):
    """One server of a replica; the server on the replica's first node takes the requests."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)
        if self.node_rank:
            return
        self._in_flight = 0
        self._polls: list[tuple[int, int]] = []
        self._cached_tokens: dict[str, int] = {}
        self.tokenizer_manager.generate_request = self._noting(self.tokenizer_manager.generate_request)
        self._poller = asyncio.create_task(self._poll())
        self._poller.add_done_callback(_tell)

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **kwargs: Any) -> Any:
        """verl's, with ``num_cached_tokens`` among the answer's extra fields.

        verl's vLLM server has the same field.
        """
        self._in_flight += 1
        try:
            output: TokenOutput = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._in_flight -= 1
            cached = self._cached_tokens.pop(request_id, None)
        output.extra_fields["num_cached_tokens"] = cached
        return output

    async def until_it_dies(self) -> None:
        """Return never: Ray fails the call when this process ends, and so tells the trainer."""
        await asyncio.Event().wait()

    def _noting(self, generate_request: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        """Wrap ``generate_request`` to keep the number of cached tokens.

        verl's ``generate`` keeps the tokens of SGLang's answer and drops its ``meta_info``.
        """

        async def noted(request: Any, http: Any = None) -> AsyncIterator[Any]:
            async for output in generate_request(request, http):
                if isinstance(output, dict) and "cached_tokens" in output["meta_info"]:
                    self._cached_tokens[output["meta_info"]["id"]] = output["meta_info"]["cached_tokens"]
                if isinstance(output, dict) and isinstance(output["meta_info"].get("routed_experts"), str):
                    output["meta_info"]["routed_experts"] = self._routes(output["meta_info"]["routed_experts"])
                yield output

        return noted

    def _routes(self, encoded: str) -> torch.Tensor:
        """The experts [T, L, K] in an answer of SGLang's, in the form that verl reads.

        verl expects a tensor with skip_tokenizer_init; SGLang's releases encode it either way.
        """
        text = self.model_config.hf_config.get_text_config()
        flat = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
        return flat.view(-1, text.num_hidden_layers, text.num_experts_per_tok)

    async def _poll(self) -> None:
        """While there are requests, note the scheduler's counts.

        They are summed over its data-parallel ranks.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._in_flight:
                loads = await self.tokenizer_manager.get_loads(include=["core"])
                running, queued = (sum(getattr(load, f"num_{kind}_reqs") for load in loads) for kind in KINDS)
                self._polls.append((running, queued))

    async def take_polls(self) -> list[tuple[int, int]]:
        """(running, queued) of each poll since the last call."""
        polls, self._polls = self._polls, []
        return polls


def _tell(poller: asyncio.Task[None]) -> None:
    """Log a warning when polling has failed; the run goes on without the numbers."""
    if not poller.cancelled() and (error := poller.exception()):
        logger.warning("SGLang's load is not polled any more: %r", error)
