"""Sizes and checksums of a checkpoint's files: computed after writing, verified before loading.

A file's checksum is the CRC-32 of the CRC-32s of its 64 MiB pieces, so that threads can share a
large file. It detects corruption by disks and copies, even of four bytes, but does not stop an
attacker. zlib processes 1.7 GB/s per core. Every rank computes the checksums of its own files,
which are still in its node's page cache, so the total time is that of one rank.
"""

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from retool_mcore.run import alive
from retool_mcore.run.folder import write_whole
from retool_mcore.run.step_folders import SUMS, files_of

PIECE_BYTES = 64 * 2**20
READ_BYTES = 2**20
THREADS = 8
TOLD = 3  # number of damaged files that an error names
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")  # Megatron names a file after the rank that wrote it


@dataclass(frozen=True)
class Sum:
    bytes: int
    crc32: str


def record(role: Path, rank: int) -> None:
    """Record the checksums of the files that ``rank`` wrote under ``role`` (``.../actor``)."""
    folder = role.parent
    mine = [path for path in files_of(folder) if path.is_relative_to(role) and _writer(path, role) == rank]
    times = [path.stat().st_mtime_ns for path in mine]
    sums = zip(mine, take(mine), times, strict=True)
    rows = {str(path.relative_to(folder)): {**asdict(found), "mtime_ns": time} for path, found, time in sums}
    write_whole(folder / SUMS / f"{role.name}-{rank}.json", json.dumps(rows))


def _writer(path: Path, role: Path) -> int | None:
    """Return the rank that wrote a file; None for metadata files, which belong to no rank."""
    if found := _OF_RANK.fullmatch(path.name):
        return int(found[1])
    return 0 if path.is_relative_to(role / "model") else None


def collect(folder: Path) -> dict[str, Any]:
    """Return the checksums of all files of a finished checkpoint, by path relative to ``folder``.

    Reads the files that no rank recorded or that changed after recording.
    """
    recorded: dict[str, Any] = {}
    for path in (folder / SUMS).glob("*.json"):
        recorded |= json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    unknown: list[Path] = []
    for path in files_of(folder):
        name, status = str(path.relative_to(folder)), path.stat()
        row = recorded.get(name, {})
        if (row.get("bytes"), row.get("mtime_ns")) == (status.st_size, status.st_mtime_ns):
            found[name] = {"bytes": row["bytes"], "crc32": row["crc32"]}
        else:
            unknown.append(path)
    read = zip(unknown, take(unknown), strict=True)
    return found | {str(path.relative_to(folder)): asdict(taken) for path, taken in read}


def damage(folder: Path, files: Mapping[str, Any], under: str = "") -> str:
    """Describe which of ``files`` differ from what was written; "" if none do.

    ``under``: check only files whose relative path starts with this prefix.
    """
    wanted = {folder / name: Sum(**row) for name, row in files.items() if name.startswith(under)}
    wrong = [said for path, row in wanted.items() if (said := _wrong_size(path, row, folder))]
    if not wrong:  # read the contents only if all sizes match
        read = zip(wanted.items(), take(wanted), strict=True)
        wrong = [f"{path.relative_to(folder)} has other bytes than were written" for (path, row), now in read
                 if now != row]  # fmt: skip
    more = f" and {len(wrong) - TOLD} more" if len(wrong) > TOLD else ""
    return "; ".join(wrong[:TOLD]) + more


def _wrong_size(path: Path, wanted: Sum, folder: Path) -> str:
    name = path.relative_to(folder)
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return "" if size == wanted.bytes else f"{name} has {size} bytes and was written with {wanted.bytes}"


def take(paths: Iterable[Path]) -> list[Sum]:
    """Compute the checksum of each file in up to 8 threads; zlib releases the GIL."""
    files = {path: path.stat().st_size for path in paths}
    pieces = [(path, start) for path, size in files.items() for start in range(0, max(size, 1), PIECE_BYTES)]
    crcs: dict[Path, int] = dict(zip(files, repeat(0)))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        for (path, _), crc in zip(pieces, threads.map(_crc_of_piece, pieces), strict=True):
            crcs[path] = zlib.crc32(crc.to_bytes(4, "big"), crcs[path])
            alive.sign()
    return [Sum(size, f"{crcs[path]:08x}") for path, size in files.items()]


def _crc_of_piece(piece: tuple[Path, int]) -> int:
    path, start = piece
    crc, left, buffer = 0, PIECE_BYTES, memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            crc, left = zlib.crc32(buffer[:count], crc), left - count
    return crc
