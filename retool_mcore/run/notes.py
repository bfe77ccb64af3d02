"""Notes for the user from code that has no terminal: they go to the run's, while it has one."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

notes = logging.getLogger(__name__)


class _OnConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"note: {record.getMessage()}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def notes_on(console: Console, of: logging.Logger = notes) -> Generator[None]:
    """Print what ``of`` is given on ``console``, above a bar of steps where there is one."""
    handler = _OnConsole(console)
    of.addHandler(handler)
    try:
        yield
    finally:
        of.removeHandler(handler)
