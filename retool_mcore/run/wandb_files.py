"""What the files of Weights & Biases tell: the steps that it was given, and if it has a key."""

import configparser
import importlib
import netrc
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of LevelDB's log format; the file's own header has 7 bytes, too
WHOLE, LAST = 1, 4  # kinds of a record's parts


def steps_on_disk(folder: Path, run_id: str) -> set[int]:
    """The steps in all ``*.wandb`` files of a run below ``folder``, each start's among them."""
    record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    found = (record.FromString(raw) for path in folder.glob(f"*/run-{run_id}.wandb") for raw in _records(path))
    return {each.history.step.num for each in found if each.HasField("history")}


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, up to one that a kill cut short."""
    raw, at, parts = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(raw):
        if (room := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += room
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        at += HEADER_BYTES + length
        if at > len(raw) or kind == 0:
            return
        parts += raw[at - length : at]
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def lacks_key(environ: Mapping[str, str], home: Path) -> bool:
    """Whether Weights & Biases would write to a server, and no key for it is found.

    It looks in WANDB_API_KEY, and under the server's name in ``~/.netrc``: `wandb login` writes it.
    """
    if environ.get("WANDB_MODE", _setting("mode", home)) in ("offline", "dryrun", "disabled"):
        return False
    if any(environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DISABLED")):
        return False
    url = environ.get("WANDB_BASE_URL") or _setting("base_url", home) or "https://api.wandb.ai"
    for path in (Path(environ.get("NETRC") or home / ".netrc").expanduser(), home / "_netrc"):
        try:
            if netrc.netrc(path).authenticators(urlsplit(url).netloc):
                return False
        except (OSError, netrc.NetrcParseError):
            continue
    return True


def _setting(name: str, home: Path) -> str:
    """What `wandb offline` or `wandb login --host` wrote, here or else in the user's folder."""
    settings = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error):
        settings.read([home / ".config" / "wandb" / "settings", Path("wandb", "settings")])
    return settings.get("default", name, fallback="")
