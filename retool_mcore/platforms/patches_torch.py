"""Patch of torch: makes TCPStore listen on one address only.

Does not import torch, because `import verl` loads this file in every process of a run.
"""

import ipaddress
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

from retool_mcore.platforms.patches import Change, Patch, requirement


def _listen_on_host(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(
        self: Any, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *more: Any,
        **named: Any,
    ) -> None:  # fmt: skip
        if is_master and (listener := _listener(host_name, port)):
            port = listener.getsockname()[1]
            named["master_listen_fd"] = listener.detach()  # the store closes it
        original(self, host_name, port, world_size, is_master, *more, **named)

    return __init__


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens on ``host``; None if the store must open its own.

    The store must open its own if ``host`` is a name other than localhost. Such a name may resolve
    to a loopback address here and to another one elsewhere: on Debian a host's own name resolves to
    127.0.1.1. The store must also open its own if the port is in use, because torch can share a
    store that this process already has there.
    """
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    except (OSError, ValueError):
        return None


STORE_PATCH = Patch(
    changes=(Change("torch.distributed.TCPStore.__init__", None, _listen_on_host),),
    reason="torch's store listens on every interface, whatever its host_name is",
    gain="Security: other machines cannot reach the stores of verl's workers, SGLang's schedulers and torchrun",
    applies_to=requirement("torch"),
    remove_when="torch.distributed.TCPStore listens on its host_name",
)
