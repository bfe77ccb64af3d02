"""Protects a run's ports: on one node they listen on loopback, and Ray and SGLang require a secret.

Ray and SGLang unpickle the data they receive, so anyone who can connect to their ports can run code
as the user. Loopback excludes other machines; the secret excludes other users of this machine.
"""

import hmac
import os
import secrets
from pathlib import Path

# Linux gives clients ports from 32768 up. Our servers listen below that, so that no client takes
# a port before its server starts.
LISTEN_PORTS = (15_000, 32_000)
# Makes Ray use loopback as the node's address, as on a Mac. SGLang and TransferQueue get the
# address from Ray. ray.init(_node_ip_address=...) would replace a loopback address by the node's.
RAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # a value that the user exported takes precedence
RAY_SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def use_loopback() -> None:
    """Set the environment variables that keep a one-node run's ports on loopback.

    The run's processes inherit them. Call it before Ray is imported and torch.distributed is used.
    """
    os.environ.update(RAY_ON_LOOPBACK, RAY_AUTH_MODE="token")
    for name in INTERFACES:
        os.environ.setdefault(name, "lo")
    if not any(os.environ.get(name) for name in RAY_SECRETS):
        # Do not use Ray's ~/.ray/auth_token: its mode follows the user's umask, and it is never
        # deleted.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def engine_key() -> str:
    """The API key of the run's SGLang servers, derived from Ray's secret; "" if Ray has none."""
    secret, path = (os.environ.get(name, "") for name in RAY_SECRETS)
    if not secret and path:
        secret = Path(path).read_text(encoding="utf-8").strip()
    return hmac.new(secret.encode(), b"SGLang", "sha256").hexdigest() if secret else ""
