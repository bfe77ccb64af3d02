"""SGLang's HTTP server takes pickled weights, and answers only who knows the run's key.

The key follows from the secret of the run's Ray, which all processes of the run have.
"""

import hmac
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement


def engine_key() -> str:
    """What a request's ``Authorization: Bearer`` must say; "" where Ray has no secret, either."""
    secret, path = (os.environ.get(name, "") for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not secret and path:
        secret = Path(path).read_text(encoding="utf-8").strip()
    return hmac.new(secret.encode(), b"SGLang", "sha256").hexdigest() if secret else ""


def _with_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def _get_session(self: Any) -> AsyncIterator[Any]:
        async with original(self) as session:
            if key := engine_key():
                session.headers["Authorization"] = f"Bearer {key}"
            yield session

    return _get_session


KEY_PATCH = Patch(  # applied in the processes that send weights: verl/sglang_server.py
    target="verl.workers.rollout.sglang_rollout.http_server_engine.AsyncHttpServerAdapter._get_session",
    replace=_with_key,
    reason="verl sends weights to SGLang's server without the key that the server may ask for",
    applies_to=requirement("verl"),
    remove_when="verl's adapter sends server_args.api_key with each request",
)
