"""A run on one node keeps to loopback, and its Ray has a secret that no other run has."""

import os

import pytest

from retool_mcore.platforms.network import INTERFACES, RAY_SECRETS, keep_to_loopback


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", *INTERFACES, *RAY_SECRETS):
        monkeypatch.setenv(name, "")  # or what the call sets stays after the test
        monkeypatch.delenv(name)


def test_each_start_has_a_secret_of_its_own(monkeypatch):
    keep_to_loopback()
    first = os.environ["RAY_AUTH_TOKEN"]
    assert len(first) == 64 and os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    keep_to_loopback()
    assert os.environ["RAY_AUTH_TOKEN"] != first


@pytest.mark.parametrize("name", RAY_SECRETS)
def test_the_users_own_secret_is_kept(monkeypatch, name: str):
    monkeypatch.setenv(name, "/their/own")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    keep_to_loopback()
    assert {each: os.environ.get(each) for each in RAY_SECRETS if each in os.environ} == {name: "/their/own"}
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_the_users_own_interface_is_kept(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    keep_to_loopback()
    assert [os.environ[name] for name in INTERFACES] == ["lo", "ib0"]
