from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numerics.rank_pool import close_all


@pytest.fixture(scope="package", autouse=True)
def no_rank_stays() -> Iterator[None]:
    """After the last test of this folder."""
    yield
    close_all()
