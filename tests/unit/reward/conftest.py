"""The reward's tests measure time: no collection of garbage falls into it."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """In a long session a collection of all that other tests have left takes half a second."""
    gc.disable()
    yield
    gc.enable()
