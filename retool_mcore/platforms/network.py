"""A run's ports: on one node they listen on loopback, and Ray and SGLang ask for the run's secret.

Ray and SGLang unpickle what they are sent, so whoever reaches their ports runs code as the user.
Loopback keeps other machines out, the secret keeps out other users of this machine.
"""

import hmac
import os
import secrets
from pathlib import Path

# Linux gives clients ports from 32768 on. A port for a later listener comes from this range, so
# that no client has it by then.
LATER_PORTS = (15_000, 32_000)
# Ray then takes loopback for the node's address, as on a Mac. SGLang and the transfer queue ask Ray
# for the address. ray.init(_node_ip_address=...) turns a loopback address into the node's own.
RAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # a value that the user exported stays
RAY_SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def keep_to_loopback() -> None:
    """Set the environment of a run on one node, which its processes inherit.

    Call it before Ray is imported and before torch.distributed is used.
    """
    os.environ.update(RAY_ON_LOOPBACK, RAY_AUTH_MODE="token")
    for name in INTERFACES:
        os.environ.setdefault(name, "lo")
    if not any(os.environ.get(name) for name in RAY_SECRETS):
        # Ray's own file ~/.ray/auth_token would have the mode of the user's umask, and stay.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def engine_key() -> str:
    """The key of the run's SGLang servers, derived from Ray's secret; "" where Ray has none."""
    secret, path = (os.environ.get(name, "") for name in RAY_SECRETS)
    if not secret and path:
        secret = Path(path).read_text(encoding="utf-8").strip()
    return hmac.new(secret.encode(), b"SGLang", "sha256").hexdigest() if secret else ""
