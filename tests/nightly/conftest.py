"""`make test-long` runs what is here, and not `make test`. Tests of GPUs keep their own marks."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICES = ("gpu", "multi_gpu", "npu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not any(item.get_closest_marker(name) for name in DEVICES):
            item.add_marker("long")
