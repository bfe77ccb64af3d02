"""Our plugin for verl (entry point group ``verl.plugins``), loaded by each ``import verl``.

It registers the run's platform with verl and makes torch's TCPStore listen on its own address only.
It is cheap to import, and does nothing in processes that belong to no run of ours.
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

    Call it after ``Platform.activate()``. If a plugin fails to load, verl only logs it at DEBUG. It
    then rejects an unregistered VERL_PLATFORM, or detects a platform if the variable is not set.
    """
    _load()  # the import of this module may have preceded ``activate``
    from verl.plugin.platform import get_platform as verl_platform

    expected = os.environ.get("VERL_PLATFORM", "")
    if not os.environ.get(PLATFORM_ENV):
        raise PlatformError(f"{PLATFORM_ENV} is not set: call get_platform(run.platform).activate() first.")
    try:
        vendor = verl_platform().vendor_name
    except ValueError as error:  # the name is not registered
        install = get_platform(os.environ[PLATFORM_ENV]).install
        raise PlatformError(
            f'verl does not know VERL_PLATFORM = "{expected}": {error} Install the pinned verl: `{install}`.'
        ) from error
    if vendor != expected:
        raise PlatformError(
            f'verl runs on platform "{vendor}", but the run needs "{expected}". '
            "Call activate() before this process uses verl."
        )


_load()
