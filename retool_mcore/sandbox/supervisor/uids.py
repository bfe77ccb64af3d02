"""Uids of executions that no other sandbox of this machine uses at the same time (for root)."""

import errno
import os
import socket

from retool_mcore.errors import SandboxUnavailable

# Above the uids that distributions hand out and below `nobody`.
FIRST, COUNT = 61_000, 4_480
_BLOCK = 16


class Uids:
    """The uids of one sandbox: a number always has the same one. ``close`` gives them back.

    They are claimed in blocks. A claim is a name among the abstract Unix sockets: the kernel gives
    it to one process alone, and takes it back when that ends, however it ends. Its first part is
    ``name``: sandboxes of another one are not heeded.
    """

    def __init__(self, name: str = "retool-sandbox-uids") -> None:
        self._name = name
        self._claims: list[socket.socket] = []
        self._starts: list[int] = []

    def of(self, number: int) -> int:
        """The uid of slot ``number``, from -1 on. Raises SandboxUnavailable where none is left."""
        block, place = divmod(number + 1, _BLOCK)
        while len(self._starts) <= block:
            self._claim()
        return self._starts[block] + place

    def _claim(self) -> None:
        num_blocks = COUNT // _BLOCK
        for number in range(num_blocks):
            start = FIRST + (os.getpid() + number) % num_blocks * _BLOCK
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0{self._name}-{start}")
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self._claims.append(claim)
                self._starts.append(start)
                return
        raise SandboxUnavailable(
            f"the sandboxes of this machine hold all {COUNT} uids of executions. End some, or lower workers, sessions."
        )

    def close(self) -> None:
        """Give all uids back."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()
        self._starts.clear()
