"""verl's entry point (group ``verl.plugins``), which ``import verl`` imports in every process.

It is cheap, and does nothing unless the process belongs to a run of ours. In such a process it
registers the run's platform with verl, and keeps torch's store to its own address.
"""

import os

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import PLATFORM_ENV, get_platform
from retool_mcore.platforms.patches_torch import STORE_PATCH


def _load() -> None:
    if name := os.environ.get(PLATFORM_ENV):
        STORE_PATCH.apply()
        get_platform(name).extend_verl()


def assert_loaded() -> None:
    """Raise PlatformError unless verl uses the run's platform.

    Call it after ``Platform.activate()``. When a plugin fails to load, verl logs that at DEBUG and
    goes on with `nvidia`.
    """
    _load()  # this module may have been imported before the run's platform was known
    from verl.plugin.platform import get_platform as verl_platform

    expected = os.environ.get("VERL_PLATFORM", "")
    if not os.environ.get(PLATFORM_ENV):
        raise PlatformError(f"{PLATFORM_ENV} is not set: call get_platform(run.platform).activate() first.")
    try:
        found = verl_platform().vendor_name
    except ValueError as error:  # the name is not registered
        raise PlatformError(f'verl does not know VERL_PLATFORM = "{expected}": {error}') from error
    if found != expected:
        raise PlatformError(f'verl runs on platform "{found}" and the run asks for "{expected}".')


_load()
