"""A run's ports: on loopback for one node, with a secret, and away from the ports of clients."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from retool_mcore.platforms.network import INTERFACES, LISTEN_PORTS, RAY_SECRETS, engine_key, use_loopback
from retool_mcore.platforms.patches_torch import STORE_PATCH
from retool_mcore.platforms.patches_verl import MASTER_PORT_PATCH
from tests.sockets import listening

PATCH = STORE_PATCH
EVERY_INTERFACE = ["::", "0.0.0.0"]


@pytest.fixture
def nothing_set(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", *INTERFACES, *RAY_SECRETS):
        monkeypatch.setenv(name, "")  # or what the call sets stays after the test
        monkeypatch.delenv(name)


def test_each_start_has_another_secret_and_engines_a_key_of_it(nothing_set, monkeypatch, tmp_path: Path):
    assert engine_key() == "", "a cluster of the user's without a secret"
    use_loopback()
    first, key = os.environ["RAY_AUTH_TOKEN"], engine_key()
    assert len(first) == 64 and os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "which makes Ray use loopback"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_text(f"{first}\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert engine_key() == key, "that of nodes which read the secret from a file"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    use_loopback()
    assert os.environ["RAY_AUTH_TOKEN"] != first and engine_key() != key


@pytest.mark.parametrize("name", RAY_SECRETS)
def test_the_users_own_secret_and_interface_are_kept(nothing_set, monkeypatch, name: str):
    monkeypatch.setenv(name, "/their/own")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_loopback()
    assert {each: os.environ.get(each) for each in RAY_SECRETS if each in os.environ} == {name: "/their/own"}
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert [os.environ[name] for name in INTERFACES] == ["lo", "ib0"]


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.9", ["127.0.0.9"]),
        ("localhost", ["127.0.0.1", "::1"]),
        ("::1", ["::1"]),
        (socket.gethostname(), EVERY_INTERFACE),  # a name may resolve to another address on other nodes
    ],
)
def test_a_store_listens_on_its_host(patched, host: str, addresses: list[str]):
    from torch._C._distributed_c10d import TCPStore

    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    before = listening([os.getpid()])
    store = TCPStore(host, 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
    shared = TCPStore(host, store.port, is_master=True, multi_tenant=True, timeout=timedelta(seconds=10))
    shared.set("key", "value")
    assert store.get("key") == b"value"
    (mine,) = set(listening([os.getpid()])) - set(before)
    address, _, port = mine.rpartition(":")
    assert address in addresses and int(port) == store.port == shared.port


def test_a_worker_groups_store_gets_a_port_below_the_client_ports():
    """From a random start, because two runs that start at the same time need different ports."""
    ranges: list[list[int]] = []
    [change] = MASTER_PORT_PATCH.changes
    choose = change.replace(lambda group, pg, bundle_index, ports: ranges.append(ports))
    for _ in range(20):
        choose(None, pg=None)
    first, end = LISTEN_PORTS
    assert all(first <= start < stop == end <= 32_768 for start, stop in ranges)
    assert len({start for start, _ in ranges}) > 15
