"""Where torch's store listens, at which port, and the headers that verl sends to a server."""

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from retool_mcore.platforms.patches_verl import API_KEY_PATCH, MASTER_PORT_PATCH
from tests.sockets import listening


def where_the_store_listens(_: object, host: str = "127.0.0.1") -> str:
    """The address of a store on ``host`` that another store of this process and port shares."""
    from torch._C._distributed_c10d import TCPStore

    before = listening([os.getpid()])
    store = TCPStore(host, 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
    shared = TCPStore(host, store.port, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
    shared.set("key", "value")
    (mine,) = set(listening([os.getpid()])) - set(before)
    assert store.get("key") == b"value"
    address, _, port = mine.rpartition(":")
    assert int(port) == store.port == shared.port
    return address


def headers_to_a_server(_: object) -> str:
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    adapter = AsyncHttpServerAdapter.__new__(AsyncHttpServerAdapter)
    adapter.max_connections, adapter.timeout = 4, 1.0

    async def headers() -> str:
        async with adapter._get_session() as session:
            return repr(dict(session.headers))

    with mock.patch.dict(os.environ, RAY_AUTH_TOKEN="a secret"):
        return asyncio.run(headers())


def ports_of_workers(_: object) -> list[int]:
    """Twenty ports that verl chooses, one after the other, for the stores of worker groups."""
    import ray
    from verl.single_controller.ray import base

    choose = base.get_master_addr_port._function
    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=choose))
    ports = []
    with (
        mock.patch.object(base, "get_master_addr_port", task),
        mock.patch.object(base, "PlacementGroupSchedulingStrategy", lambda **_: None),
        mock.patch.object(ray, "get", lambda chosen: chosen),
        mock.patch.object(ray.util, "get_node_ip_address", lambda: "127.0.0.1"),
    ):
        for _ in range(20):
            group: Any = SimpleNamespace(_master_addr=None, _master_port=None)
            base.RayWorkerGroup._get_master_addr_port(group, pg=None)
            ports.append(int(group._master_port))
    return ports


def are_ports_of_clients(_: object) -> str:
    clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return f"of clients: {any(port >= clients for port in ports_of_workers(None))}"


PROBES = {
    MASTER_PORT_PATCH.changes[0].target: are_ports_of_clients,
    API_KEY_PATCH.changes[0].target: headers_to_a_server,
    "torch.distributed.TCPStore.__init__": where_the_store_listens,
}
