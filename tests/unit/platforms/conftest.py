from collections.abc import Iterator

import pytest


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[None]:
    """The module's PATCH is applied."""
    patch = request.module.PATCH
    was_applied = patch.applied
    patch.apply()
    yield
    if not was_applied:
        patch.revert()
