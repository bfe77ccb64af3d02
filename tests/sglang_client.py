"""Plain HTTP to an SGLang server that a test has started."""

from typing import Any

from retool_mcore.rollout.server import SglangServer


def access(server: SglangServer) -> dict[str, Any]:
    """Arguments of an httpx client: the server's address and key, and no proxy."""
    headers = {"Authorization": f"Bearer {server.key}"}
    return {"base_url": f"http://127.0.0.1:{server.port}", "headers": headers, "timeout": 300, "trust_env": False}
