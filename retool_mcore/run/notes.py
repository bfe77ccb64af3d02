"""Notes for the user from code that has no terminal: they go to the run's, while it has one."""

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from rich.console import Console

from retool_mcore.run.lines import folded

notes = logging.getLogger(__name__)


def tell(console: Console, text: str) -> None:
    """Print ``text`` as it is; on a terminal it is folded between words."""
    console.print(folded(text, console.file), markup=False, highlight=False, soft_wrap=True)


def show_commands(console: Console, lines: Iterable[str]) -> None:
    """Print lines that are copied: a terminal breaks them where it likes, and copies them whole."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


class _OnConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        tell(self._console, f"note: {record.getMessage()}")


@contextmanager
def notes_on(console: Console, of: logging.Logger = notes) -> Generator[None]:
    """Print what ``of`` is given on ``console``, above a bar of steps where there is one."""
    handler = _OnConsole(console)
    of.addHandler(handler)
    try:
        yield
    finally:
        of.removeHandler(handler)
