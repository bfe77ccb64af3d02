"""An ``Engine`` that uses any SGLang server over HTTP.

POST /generate takes token ids and returns token ids and log-probs.
"""

import contextlib
import json
import logging
from types import TracebackType
from typing import Any, Self

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from retool_mcore.config.base import is_table
from retool_mcore.errors import RolloutError
from retool_mcore.rollout.engine import EngineTurn, EngineUnavailable, TurnRequest
from retool_mcore.transport import ConcurrentTransport

logger = logging.getLogger(__name__)

_TOO_MANY, _SERVER_ERROR = 429, 500
BACKOFF = wait_exponential_jitter(multiplier=0.2, max=5.0)


class _Unreachable(Exception):
    """A transient failure of one attempt. Wait at least ``pause_s`` seconds to retry."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds from the Retry-After header; 0 if it is absent or a date."""
    header = response.headers.get("Retry-After", "")
    return float(header) if header.isdecimal() else 0.0


def _wait(state: RetryCallState) -> float:
    """Exponential backoff in seconds with jitter, and at least the server's Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    requested_s = error.pause_s if isinstance(error, _Unreachable) else 0.0
    return max(requested_s, BACKOFF(state))


class SglangEngine:
    """Client of one SGLang server, for any number of concurrent trajectories.

    ``retry_s``: how long to retry a request while the server is unavailable (restarting). A retry
    samples the whole request again. ``timeout_s``: time limit of one attempt; a longer attempt
    counts as failed. A password in ``url`` (http://:KEY@HOST:PORT) is the server's API key;
    ``self.url`` omits it and is safe to print.
    """

    def __init__(self, url: str, *, timeout_s: float = 1800.0, retry_s: float = 120.0) -> None:
        parsed = httpx.URL(url.rstrip("/"))
        self.url = str(parsed.copy_with(userinfo=b""))
        self.retry_s = retry_s
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {parsed.password}"} if parsed.password else {},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            transport=ConcurrentTransport(),
            trust_env=False,  # a proxy from the environment cannot reach a server in this cluster
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def generate(self, request: TurnRequest) -> EngineTurn:
        """See ``Engine.generate``.

        Raises RolloutError without retrying if the server rejects the request (4xx except 429).
        """
        answer = await self.post("/generate", self.body(request))
        meta = answer["meta_info"]
        entries: list[Any] = meta.get("output_token_logprobs") or []
        logprobs = [float(entry[0]) for entry in entries]
        output_ids = [int(token_id) for token_id in answer["output_ids"]]
        reason = meta["finish_reason"]["type"]
        assert reason in ("stop", "length", "abort"), f"unknown finish_reason {meta['finish_reason']!r}"
        version = str(meta.get("weight_version", ""))
        return EngineTurn(
            token_ids=output_ids,
            logprobs=logprobs,
            stop=reason,
            version=int(version) if version.isdecimal() else 0,
            context_tokens=meta["prompt_tokens"],
            cached_tokens=meta.get("cached_tokens"),
        )

    def body(self, request: TurnRequest) -> dict[str, Any]:
        """The body of POST /generate."""
        sampling = request.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if custom := request.custom_params:
            params["custom_params"] = custom
        return {"input_ids": list(request.token_ids), "sampling_params": params, "return_logprob": True}

    async def load(self, model_path: str, version: int = 0) -> None:
        """Load the weights in a directory into the server and flush its KV cache.

        The architecture must be the same. Raises RolloutError if the server cannot load them.
        """
        body = {"model_path": model_path, "weight_version": str(version), "flush_cache": True}
        await self.post("/update_weights_from_disk", body)

    async def model_info(self) -> dict[str, Any]:
        """The server's /get_model_info (model_path, ...)."""
        return await self.post("/get_model_info", None)

    async def post(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """POST ``body`` and return the JSON response; GET if ``body`` is None.

        Raises EngineUnavailable if attempts fail for ``retry_s``, RolloutError if the server
        rejects the request.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Unreachable),
            stop=stop_after_delay(self.retry_s),
            wait=_wait,
        )
        try:
            return await retrying(self._attempt, path, body)
        except RetryError as error:
            last = error.last_attempt.exception()
            raise EngineUnavailable(f"{self.url}{path} failed for {self.retry_s:g} s: {last}") from last

    async def _attempt(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = await (self._client.get(path) if body is None else self._client.post(path, json=body))
        except httpx.TransportError as error:
            logger.debug("%s%s: %r", self.url, path, error)
            raise _Unreachable(f"{type(error).__name__}: {error}") from error
        if response.status_code >= _SERVER_ERROR or response.status_code == _TOO_MANY:
            raise _Unreachable(f"status {response.status_code}: {response.text[:300]}", _retry_after_s(response))
        if response.is_error:
            raise RolloutError(f"{self.url}{path} rejected the request: {response.status_code} {response.text[:500]}")
        with contextlib.suppress(json.JSONDecodeError):
            answer = response.json()
            if is_table(answer):
                return answer
        raise RolloutError(f"{self.url}{path} is not an SGLang server: it returned {response.text[:200]!r}")
