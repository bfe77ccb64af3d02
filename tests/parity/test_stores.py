"""Without the patch a store listens on every interface."""

import pytest

from retool_mcore.platforms.patches_torch import STORE_PATCH
from tests.unit.platforms.doors import where_the_store_listens
from tests.unit.platforms.test_stores import EVERY_INTERFACE


def test_without_the_patch_it_listens_on_every_interface():
    if STORE_PATCH.applied:
        pytest.skip("another test of this process has applied it")
    assert where_the_store_listens(None) in EVERY_INTERFACE
