"""Our SGLang server under Ray: concurrent requests. tests/engine/test_servers.py has its start."""

from typing import Any

import pytest

from tests.scenario import run_scenario


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_scenario("tests.nightly.servers_scenario")


def test_no_request_waits_in_ray_and_none_keeps_the_abort_waiting(found: dict[str, Any]):
    assert found["started of 1536"] == 1536
    assert found["room"] > 2 * 16_384, "a step of the paper and a validation"
