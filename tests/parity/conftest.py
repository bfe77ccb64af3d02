"""The fixture of tests/unit/platforms."""

from tests.unit.platforms.conftest import patched

__all__ = ["patched"]
