"""A stream of any length in bounded memory: its head, its tail, and how much lay between."""

MAX_STREAM_BYTES = 64 << 10  # of a notebook cell, whose output a model reads
MAX_SCRIPT_STREAM_BYTES = 1 << 20  # of a plain script, whose output a grader compares
_MAX_FOLDED_BYTES = 1 << 20


class BoundedOutput:
    """Keeps at most ``limit_bytes``: half from the start of the stream, half from its end."""

    def __init__(self, limit_bytes: int = MAX_STREAM_BYTES) -> None:
        self._half = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total_bytes = 0

    def write(self, data: bytes) -> None:
        """Append ``data``; once both halves are full, drop bytes from the middle."""
        self._total_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    @property
    def is_flood(self) -> bool:
        """Whether so much came that its writer may wait."""
        return self.overflowed

    @property
    def overflowed(self) -> bool:
        """Whether something has been dropped."""
        return self._total_bytes > 2 * self._half

    def text(self) -> tuple[str, int]:
        """The stream as text, and the number of bytes dropped.

        Bytes that are not UTF-8 are escaped (``\\xff``).
        """
        tail = bytes(self._tail[-self._half :]) if self._half else b""
        if not self.overflowed:
            return _decode(bytes(self._head) + tail), 0
        head, tail = _without_cut_end(bytes(self._head)), _without_cut_start(tail)
        dropped_bytes = self._total_bytes - len(head) - len(tail)
        return f"{_decode(head)}\n[... {dropped_bytes} bytes dropped ...]\n{_decode(tail)}", dropped_bytes


class CellOutput(BoundedOutput):
    """The stream of a notebook cell: a line shows what a terminal would after its carriage returns.

    Folding comes before the limit. The line at work is held back, and what came before its last
    carriage return is folded whenever it grows long; a line that is then still longer than
    ``limit_bytes`` is let go in parts. Of a flood only the first MiB is folded: the supervisor
    does this work, beside that for other calls.
    """

    def __init__(self, limit_bytes: int = MAX_STREAM_BYTES) -> None:
        super().__init__(limit_bytes)
        self._limit_bytes = limit_bytes
        self._received_bytes = 0
        self._line = bytearray()  # the line at work

    @property
    def is_flood(self) -> bool:
        """Whether so much came that its writer may wait, however little of it remains."""
        return self._received_bytes > self._limit_bytes

    def write(self, data: bytes) -> None:
        """Append ``data``, which may end anywhere in a line or a character."""
        self._received_bytes += len(data)
        if self._received_bytes > _MAX_FOLDED_BYTES:
            self._let_go()
            super().write(data)
            return
        end = data.rfind(b"\n") + 1
        if end:
            lines = bytes(self._line) + data[:end]
            super().write(b"\n".join(map(_fold, lines.split(b"\n"))) if b"\r" in lines else lines)
            self._line.clear()
        self._line += data[end:]
        if len(self._line) > 2 * self._limit_bytes:
            cut = self._line.rfind(b"\r")
            if cut >= 0:
                self._line[:cut] = _fold(bytes(self._line[:cut]))
            if len(self._line) > self._limit_bytes:
                self._let_go()

    def text(self) -> tuple[str, int]:
        """As for any stream. The line at work ends here."""
        self._let_go()
        return super().text()

    def _let_go(self) -> None:
        super().write(_fold(bytes(self._line)).removesuffix(b"\r"))
        self._line.clear()


def _fold(line: bytes) -> bytes:
    """What a terminal shows of a line: each ``\\r`` returns to its start, to write over it.

    One at the end belongs to the line's end, and stays. Blanks at the end of a line that was
    written over are what erased something longer, and go.
    """
    if b"\r" not in line:
        return line
    ending = b"\r" if line.endswith(b"\r") else b""
    parts = [part for part in line.decode(errors="surrogateescape").split("\r") if part]
    shown, length = parts[-1:], len(parts[-1]) if parts else 0
    for part in reversed(parts[:-1]):
        if len(part) > length:
            shown.append(part[length:])
            length = len(part)
    text = "".join(shown)
    return (text.rstrip(" ") if len(parts) > 1 else text).encode(errors="surrogateescape") + ending


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="backslashreplace")


def _without_cut_end(data: bytes) -> bytes:
    """Drop the bytes (at most 3) of a character that the cut has split."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return data[:-back] if back < length else data
    return data


def _without_cut_start(data: bytes) -> bytes:
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
