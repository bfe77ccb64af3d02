"""One error for a full disk, whichever library meets it."""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from retool_mcore.errors import CheckpointError

# Libraries have classes of their own for it, or none: shutil.Error holds no errno, and PyTorch's
# writer of archives says only that it stands elsewhere than it should.
WORDS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "unexpected pos")


@contextmanager
def explain_full_disk(folder: Path, remedy: str) -> Generator[None]:
    """Turn "no space left" into CheckpointError; ``remedy`` says what holds and what to do."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise CheckpointError(f"no space is left for {folder}. {remedy}") from error


def is_full(error: BaseException | None) -> bool:
    """Whether the error, or what it came from, is a full disk."""
    while error is not None:
        if any(words in str(error) for words in WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
