import pytest
import torch

from tests.unit.platforms.conftest import patched

__all__ = ["patched"]


@pytest.fixture(autouse=True, scope="session")
def no_accelerator() -> None:
    """Platform cpu refuses one."""
    if torch.accelerator.is_available():
        pytest.skip("platform cpu refuses an accelerator")
