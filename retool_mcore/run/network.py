"""On one node a run listens on loopback alone, and its Ray asks each client for a secret.

Whoever reaches a port of Ray runs code as the user, and most of the others take pickled objects.
Loopback keeps out other machines, the secret keeps out other users of this one.
"""

import os
import secrets

LOOPBACK = "lo"
# Ray then takes loopback for the node's address, as on a Mac; its processes listen there, and so
# do SGLang and the transfer queue, which ask Ray for the address. ray.init(_node_ip_address=...)
# turns a loopback address into the node's own.
RAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # the user's own choice wins
RAY_SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def keep_to_loopback() -> None:
    """Set the environment of a run on one node, which its processes inherit.

    Call it before Ray is imported and before torch.distributed is used.
    """
    os.environ.update(RAY_ON_LOOPBACK)
    for name in INTERFACES:
        os.environ.setdefault(name, LOOPBACK)
    os.environ["RAY_AUTH_MODE"] = "token"
    if not any(os.environ.get(name) for name in RAY_SECRETS):
        # Ray's own, ~/.ray/auth_token, would have the mode of the user's umask, and stay.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
