"""Captures an output stream in bounded memory: its head, its tail and the size of the gap."""

MAX_STREAM_BYTES = 64 << 10  # notebook cell: a model reads the output
MAX_SCRIPT_STREAM_BYTES = 1 << 20  # plain script: a grader compares the output


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
    def overflowed(self) -> bool:
        """Whether bytes have been dropped."""
        return self._total_bytes > 2 * self._half

    def text(self) -> tuple[str, int]:
        """Return the stream as text, and the number of bytes dropped.

        Bytes that are not UTF-8 are escaped (``\\xff``).
        """
        tail = bytes(self._tail[-self._half :]) if self._half else b""
        if not self.overflowed:
            return _decode(bytes(self._head) + tail), 0
        head, tail = _without_cut_end(bytes(self._head)), _without_cut_start(tail)
        dropped_bytes = self._total_bytes - len(head) - len(tail)
        return f"{_decode(head)}\n[... {dropped_bytes} bytes dropped ...]\n{_decode(tail)}", dropped_bytes


def as_on_a_terminal(text: str) -> str:
    """Remove text that a terminal would overwrite after a carriage return (progress bars).

    A carriage return at the end of a line (CRLF) is kept.
    """
    return "\n".join(line[:-1].rpartition("\r")[2] + line[-1:] for line in text.split("\n")) if "\r" in text else text


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="backslashreplace")


def _without_cut_end(data: bytes) -> bytes:
    """Drop the bytes (at most 3) of an incomplete UTF-8 character at the end."""
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
