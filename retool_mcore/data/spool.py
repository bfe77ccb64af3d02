"""Rows that may not fit memory: kept in a file without a name, of which 8 bytes a row stay here."""

import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

from retool_mcore.errors import DataError


class Spool(Sequence[Any]):
    """A list that only grows, in the temporary folder (TMPDIR); gone with the process.

    Raises DataError when that folder is full.
    """

    def __init__(self, rows: Iterable[Any] = ()) -> None:
        self._file = tempfile.TemporaryFile(prefix="retool-rows-")  # noqa: SIM115  as long as the rows
        self._starts = array("Q")
        self._end = 0
        for row in rows:
            self.append(row)

    def append(self, row: Any) -> None:
        packed = pickle.dumps(row, protocol=5)
        try:
            self._file.seek(self._end)
            self._file.write(packed)
        except OSError as error:
            raise DataError(
                f"{tempfile.gettempdir()}: row {len(self)} cannot be kept there: {error.strerror}. Name a folder with "
                "more room in TMPDIR"
            ) from error
        self._starts.append(self._end)
        self._end += len(packed)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        self._file.seek(self._starts[index])
        return pickle.load(self._file)
