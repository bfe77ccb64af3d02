"""torch's store listens on its host alone, if that is a number of this machine or localhost."""

import socket
from pathlib import Path

import pytest

from retool_mcore.platforms.stores import STORE_PATCH
from tests.platforms.doors import where_the_store_listens

EVERY_INTERFACE = ["::", "0.0.0.0"]


@pytest.fixture
def patched():
    was_applied = STORE_PATCH.applied
    STORE_PATCH.apply()
    yield
    if not was_applied:
        STORE_PATCH.revert()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("127.0.0.9", ["127.0.0.9"]),
        ("localhost", ["127.0.0.1", "::1"]),
        ("::1", ["::1"]),
        (socket.gethostname(), EVERY_INTERFACE),  # a name may lead other nodes elsewhere
    ],
)
def test_a_store_listens_on_its_host(patched, host: str, address: list[str]):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert where_the_store_listens(None, host) in address


def test_without_the_patch_it_listens_on_every_interface():
    if STORE_PATCH.applied:
        pytest.skip("another test of this process has applied it")
    assert where_the_store_listens(None) in EVERY_INTERFACE
