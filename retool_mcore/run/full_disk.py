"""One error for a full disk, whichever library meets it."""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from retool_mcore.errors import CheckpointError

# Libraries have classes of their own for it, or none: shutil.Error holds no errno, and PyTorch's
# writer of archives says only that it stands elsewhere than it should.
FULL = (errno.ENOSPC, errno.EDQUOT)
WORDS = {os.strerror(number): number for number in (*FULL, errno.EFBIG)} | {"unexpected pos": errno.ENOSPC}


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
    return refused_write(error) in FULL


def refused_write(error: BaseException | None) -> int:
    """Why the machine took no more bytes, by errno: a full disk, or a limit of size; else 0."""
    while error is not None:
        if found := [number for words, number in WORDS.items() if words in str(error)]:
            return found[0]
        error = error.__cause__ or error.__context__
    return 0
