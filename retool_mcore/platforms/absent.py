"""Libraries that an import does not find: other people's code goes on without an optional one."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def absent(*names: str) -> Generator[None]:
    """Let imports of these modules fail inside the block; those already imported stay."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  None: it cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
