"""Where torch's store listens, and what verl sends to a server."""

import asyncio
import os
from datetime import timedelta
from unittest import mock

from retool_mcore.platforms.patches_verl import KEY_PATCH
from tests.sockets import listening


def where_the_store_listens(_: object, host: str = "127.0.0.1") -> str:
    """The address of a store on ``host`` that another store of this process and port shares."""
    from torch._C._distributed_c10d import TCPStore

    before = listening([os.getpid()])
    store = TCPStore(host, 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
    shared = TCPStore(host, store.port, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
    shared.set("word", "said")
    (mine,) = set(listening([os.getpid()])) - set(before)
    assert store.get("word") == b"said"
    address, _, port = mine.rpartition(":")
    assert int(port) == store.port == shared.port
    return address


def what_verl_says_to_a_server(_: object) -> str:
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    adapter = AsyncHttpServerAdapter.__new__(AsyncHttpServerAdapter)
    adapter.max_connections, adapter.timeout = 4, 1.0

    async def headers() -> str:
        async with adapter._get_session() as session:
            return repr(dict(session.headers))

    with mock.patch.dict(os.environ, RAY_AUTH_TOKEN="a secret"):
        return asyncio.run(headers())


ENABLES = {
    KEY_PATCH.changes[0].target: what_verl_says_to_a_server,
    "torch.distributed.TCPStore.__init__": where_the_store_listens,
}
