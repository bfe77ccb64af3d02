"""The TCP sockets on which processes listen, as Linux lists them."""

import ipaddress
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

LISTENS = "0A"  # a socket's state in /proc/net/tcp


def listening(pids: Iterable[int]) -> dict[str, list[int]]:
    """ADDRESS:PORT of each socket on which one of the processes listens -> those that hold it."""
    found: dict[str, list[int]] = {}
    for pid in pids:
        with suppress(OSError):  # it has just ended
            held = set(_held(pid))
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                    words = line.split()
                    if words[3] == LISTENS and f"socket:[{words[9]}]" in held:
                        found.setdefault(_address(words[1]), []).append(pid)
    return found


def _held(pid: int) -> Iterator[str]:
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            yield os.readlink(f"/proc/{pid}/fd/{entry}")


def _address(written: str) -> str:
    """Linux writes an address in words of 32 bits, each back to front: 0100007F:1F90."""
    host, _, port = written.partition(":")
    swapped = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    address = ipaddress.ip_address(swapped)
    four = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None  # ::ffff:127.0.0.1
    return f"{four or address}:{int(port, 16)}"


def reachable_from_elsewhere(found: Iterable[str]) -> list[str]:
    """Those of the addresses that are not loopback's."""
    return [each for each in found if not ipaddress.ip_address(each.rpartition(":")[0]).is_loopback]
