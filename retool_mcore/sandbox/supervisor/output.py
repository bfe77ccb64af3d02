"""Captures an output stream in bounded memory: its head, its tail and the size of the gap."""

import codecs
import re

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
        tail = bytes(self._tail[-self._half :])
        if not self.overflowed:
            return (self._head + tail).decode(errors="backslashreplace"), 0
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        head = decoder.decode(bytes(self._head))  # holds back an incomplete character at the end
        tail = re.sub(rb"\A[\x80-\xbf]{1,3}", b"", tail)  # the rest of a character that was cut
        dropped_bytes = self._total_bytes - len(self._head) + len(decoder.getstate()[0]) - len(tail)
        shown = tail.decode(errors="backslashreplace")
        return f"{head}\n[... {dropped_bytes} bytes dropped ...]\n{shown}", dropped_bytes


def as_on_a_terminal(text: str) -> str:
    """Remove text that a terminal would overwrite after a carriage return (progress bars).

    A carriage return at the end of a line (CRLF) is kept.
    """
    return "\n".join(line[:-1].rpartition("\r")[2] + line[-1:] for line in text.split("\n")) if "\r" in text else text
