"""torch's store listens on the address by which it is reached, not on every interface.

verl's workers, SGLang's schedulers and torchrun each start one. Where its host is loopback, no
other machine reaches it; where it is the address of a node, other networks of that node do not.
"""

import ipaddress
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement


def _on_its_host(original: Callable[..., None]) -> Callable[..., None]:
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
    """A socket that listens on ``host``; None where the store opens its own.

    A name may lead other machines elsewhere than this one: Debian's hosts call themselves
    127.0.1.1. The port is taken where this process has the store already, which torch then shares.
    """
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    except (OSError, ValueError):
        return None


STORE_PATCH = Patch(
    target="torch.distributed.TCPStore.__init__",
    replace=_on_its_host,
    reason="torch's store listens on every interface, whatever its host_name is",
    applies_to=requirement("torch"),
    remove_when="torch.distributed.TCPStore listens on its host_name",
)
