"""torch's store: on the address by which it is reached, at a port that nobody else is given.

verl's workers, SGLang's schedulers and torchrun each start one. Where its host is loopback, no
other machine reaches it; where it is the address of a node, other networks of that node do not.
"""

import ipaddress
import random
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

from retool_mcore.platforms.network import LATER_PORTS
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement


def _below_clients(original: Callable[..., None]) -> Callable[..., None]:
    """Have verl look for a port from a random one of LATER_PORTS on.

    From a fixed one two runs that start at once would find the same.
    """

    @wraps(original)
    def _get_master_addr_port(
        self: Any, pg: Any, bundle_index: int = 0, master_port_range: list[int] | None = None
    ) -> None:
        first, end = LATER_PORTS
        master_port_range = master_port_range or [random.randrange(first, (first + end) // 2), end]
        original(self, pg, bundle_index, master_port_range)

    return _get_master_addr_port


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

MASTER_PORT_PATCH = Patch(
    target="verl.single_controller.ray.base.RayWorkerGroup._get_master_addr_port",
    replace=_below_clients,
    reason="the store listens seconds after its port was chosen from the range of clients, which another process, as "
    "of a second run's start, is then given now and then",
    applies_to=requirement("verl"),
    remove_when="verl's trainer passes its worker groups a master_port_range",
)
STORE_PATCHES = (STORE_PATCH, MASTER_PORT_PATCH)
