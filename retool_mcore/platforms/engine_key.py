"""SGLang's HTTP server takes pickled weights, and answers only who knows the run's key.

The key follows from the secret of the run's Ray, which all processes of the run have.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from retool_mcore.platforms.network import engine_key
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement


def _with_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def _get_session(self: Any) -> AsyncIterator[Any]:
        async with original(self) as session:
            if key := engine_key():
                session.headers["Authorization"] = f"Bearer {key}"
            yield session

    return _get_session


KEY_PATCH = Patch(  # applied in the processes that send weights: verl/sglang_replica.py
    target="verl.workers.rollout.sglang_rollout.http_server_engine.AsyncHttpServerAdapter._get_session",
    replace=_with_key,
    reason="verl sends weights to SGLang's server without the key that the server may ask for",
    applies_to=requirement("verl"),
    remove_when="verl's adapter sends server_args.api_key with each request",
)
