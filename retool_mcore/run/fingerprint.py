"""What must be the same on every node of a run: settings, code, packages, data and model.

It is cheap enough to take at every start.
"""

import hashlib
import importlib.metadata
import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import retool_mcore
from retool_mcore.config import RunConfig
from retool_mcore.config.base import leaves
from retool_mcore.config.model import BUILT_IN
from retool_mcore.model.files import file_hash

PACKAGES = ("torch", "verl", "megatron-core", "mbridge", "ray", "sglang", "vllm", "transformers", "mindspeed")


def fingerprint(config: RunConfig) -> dict[str, str]:
    """Map each name to its version or hash on this node, and each setting to its value."""
    found = {"host": socket.gethostname(), "python": platform.python_version(), "code": code_hash()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    for name, path in config.data_files:
        found[f"{name} = {path}"] = file_hash(Path(path))
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        found[f"model.path, {name}"] = file_hash(Path(config.model.path) / name)
    if config.model.chat_template not in ("", *BUILT_IN):
        found[f"model.chat_template = {config.model.chat_template}"] = file_hash(Path(config.model.chat_template))
    return found | {name: repr(value) for name, value in leaves(config.model_dump()).items()}


def code_hash() -> str:
    """Hash of all Python source files of this package."""
    folder = Path(retool_mcore.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def differing(nodes: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence per entry in which a node differs from the first; host names may differ."""
    first, *others = nodes
    return [
        f"{name} is {first.get(name, 'not set')} on {first['host']} and {other.get(name, 'not set')} on {other['host']}"
        for other in others
        for name in dict.fromkeys((*first, *other))
        if name != "host" and other.get(name) != first.get(name)
    ]
