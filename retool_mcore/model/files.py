"""Reads and checks a model directory's config and file list, without loading weights."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from retool_mcore.config.base import is_table
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.shape import PUBLISHED, ModelShape, shape_of_config

GENERATION = "generation_config.json"
WHOLE, ADAPTER = "model.safetensors", "adapter_config.json"
INDEX = "model.safetensors.index.json"
TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
TEXT_BYTES = 2**28  # limit for text files; the largest published tokenizers have a tenth of it
ENDS_BYTES = 2**20  # hashed at each end of a file; with the size, they identify the file
_HUB_S = 10.0  # timeout of a request to the hub


def read_config(path: str) -> dict[str, Any]:
    """``config.json`` of a local model directory or, for a hub name, from the hub cache; else {}.

    Does not use the network; ``fetch_config`` does. Raises CheckpointError if the directory is not
    a complete Hugging Face checkpoint.
    """
    folder = Path(path)
    if not folder.exists():
        if is_hub_name(path):
            return _cached_config(path)
        raise CheckpointError(
            f"model.path = {path!r} does not exist. Create it first, or name a hub model as owner/name."
        )
    refuse_gguf(path)
    require_regular_files(folder)
    values = _config_json(folder)
    if (generation := folder / GENERATION).exists():  # the engine would fail on it after minutes
        _table_of(generation, "a model's sampling settings")
    _check_shards(folder)
    return values


def require_regular_files(folder: Path) -> None:
    """Raise CheckpointError for a text file that could not be read to its end.

    Reading a named pipe would wait for a writer, and a link to a device has no end.
    """
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix not in TEXTS or file.is_dir():
            continue
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file} is not a regular file. Replace it, or remove it.")
        if file.exists() and file.stat().st_size > TEXT_BYTES:
            raise CheckpointError(
                f"{file} has {file.stat().st_size / 2**20:.0f} MiB. A configuration or tokenizer file may have at "
                f"most {TEXT_BYTES // 2**20} MiB. Replace it, or remove it."
            )


def refuse_gguf(path: str) -> None:
    """Raise CheckpointError if the path is a GGUF file instead of a model directory."""
    if Path(path).suffix == ".gguf" and Path(path).is_file():
        folder = Path(path).with_suffix("")
        raise CheckpointError(
            f"{path} is a GGUF file, but a model must be a folder. Convert it: `retool data model {path} {folder}`."
        )


def is_hub_name(path: str) -> bool:
    """Whether a model.path is a hub name (owner/name) rather than a directory."""
    return not Path(path).exists() and path.count("/") == 1 and not path.startswith((".", "/", "runs/"))


def fetch_config(name: str) -> dict[str, Any]:
    """``config.json`` of a hub name, downloaded to the hub cache if necessary.

    Raises CheckpointError if it is unavailable.
    """
    if values := _cached_config(name):
        return values
    try:
        import httpx
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise CheckpointError(
            f"model.path = {name!r} is a hub name, but huggingface_hub is not installed. Install it, or set model.path "
            "to a local folder."
        ) from error
    try:
        client: Any = huggingface_hub  # its download functions are only partly typed
        if not client.constants.HF_HUB_OFFLINE:
            # Fail fast: huggingface_hub would retry six times in half a minute and log each.
            httpx.head(client.hf_hub_url(name, "config.json"), timeout=_HUB_S)
        return _config_json(Path(client.hf_hub_download(name, "config.json")).parent)
    except (OSError, HFValidationError, HfHubHTTPError, httpx.HTTPError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"model.path = {name!r} is not a local folder, and its config.json is neither in the hub's cache nor "
            f"available from the hub: {why}. Correct the name, download the model on a machine with a network "
            f"(hf download {name}), or set model.path to its folder."
        ) from error


def _cached_config(name: str) -> dict[str, Any]:
    folder = _cached(name, "config.json")
    return _config_json(folder) if folder else {}


def _cached(name: str, file: str) -> Path | None:
    """The folder in the hub cache that contains ``file`` of a hub name; None if not cached."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:  # `retool plan` works without huggingface_hub
        return None
    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _config_json(folder: Path) -> dict[str, Any]:
    return _table_of(folder / "config.json", "a model's configuration")


def _table_of(file: Path, what: str) -> dict[str, Any]:
    """The object in a model's JSON file. Raises CheckpointError; ``what`` describes the file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not is_table(values):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{file} cannot be read as {what}: {why}. Correct it, copy or fetch it again, or name another model."
        ) from error
    return values


def dtype_of_weights(folder: Path) -> str:
    """The most common tensor dtype in a complete model directory, as a torch name ("bfloat16")."""
    dtypes: Counter[str] = Counter()
    for name in _shards(folder):
        with safe_open()(folder / name, framework="np") as shard:
            dtypes.update(shard.get_slice(key).get_dtype() for key in shard.keys())  # noqa: SIM118  not a mapping
    [(common, _)] = dtypes.most_common(1)
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(common, common)


def tensor_files(model: str) -> tuple[Path, dict[str, str]] | None:
    """The folder of a model's weights, and each tensor's file in it.

    None for a hub name whose weights are not in the cache.
    """
    folder = Path(model)
    if not folder.exists():
        cached = _cached(model, INDEX) or _cached(model, "model.safetensors")
        if cached is None:
            return None
        folder = cached
    if (folder / INDEX).is_file():
        return folder, _index(folder)
    with safe_open()(folder / "model.safetensors", framework="np") as shard:
        return folder, dict.fromkeys(shard.keys(), "model.safetensors")


def file_hash(path: Path) -> str:
    """A hash of a file's size and both ends (ENDS_BYTES each), or "missing"."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(ENDS_BYTES))
        file.seek(max(0, size - ENDS_BYTES))
        digest.update(file.read(ENDS_BYTES))
    return digest.hexdigest()[:12]


def safe_open() -> Any:
    """``safetensors.safe_open``, untyped because it is a compiled extension."""
    import safetensors

    return safetensors.safe_open


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write contiguous torch tensors; wraps the library's untyped writer."""
    torch_files: Any = import_module("safetensors.torch")
    torch_files.save_file(tensors, path, metadata={"format": "pt"})


def write_index(folder: Path, files: Mapping[str, str], size: int) -> None:
    """Write the index of a checkpoint. ``files``: tensor name -> file; ``size``: bytes."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(files)}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _index(folder: Path) -> dict[str, str]:
    files = _table_of(folder / INDEX, "an index of weights").get("weight_map")
    if not is_table(files):
        raise CheckpointError(
            f"{folder / INDEX} cannot be read as an index of weights: weight_map is not a JSON object. Copy or fetch "
            "it again."
        )
    return files


def _shards(folder: Path) -> list[str]:
    return sorted(set(_index(folder).values())) if (folder / INDEX).is_file() else ["model.safetensors"]


def check_files(folder: Path) -> None:
    """Raise CheckpointError if a folder contains its weights twice; readers would use only one."""
    if (folder / INDEX).is_file() and (folder / WHOLE).is_file() and WHOLE not in _index(folder).values():
        raise CheckpointError(
            f"{folder} has both {WHOLE} and an index ({INDEX}) that lists other files. transformers would read only "
            f"{WHOLE}. Move one of them away."
        )
    if (folder / ADAPTER).is_file() and ((folder / INDEX).is_file() or (folder / WHOLE).is_file()):
        raise CheckpointError(
            f"{folder} has {ADAPTER} and full weights, and transformers would add the adapter to them. Merge it, "
            "or move it away."
        )


def highest_token(folder: Path) -> int:
    """The highest token id in a folder's tokenizer.json; -1 if it is unreadable."""
    try:
        values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = values["model"]["vocab"]
        ids = vocabulary.values() if is_table(vocabulary) else range(len(vocabulary))
        return max([-1, *ids, *(int(token["id"]) for token in values.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1  # load_tokenizer reports the error


def _check_shards(folder: Path) -> None:
    from safetensors import SafetensorError

    for name in _shards(folder):
        try:
            with safe_open()(folder / name, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the weights {folder / name} are missing or corrupt: {error}. Copy or fetch that file again, or name "
                "another model."
            ) from error


def shape_of_model(path: str) -> ModelShape:
    """The shape of a model, from its local directory or from a published model in its name.

    The directory may lack weights, so that `retool plan` works before they are downloaded. The name
    "runs/sft_qwen2.5_7b/export", for example, contains Qwen2.5-7B. Raises ConfigError if neither
    gives the shape.
    """
    if Path(path).exists():
        return shape_of_config(_config_json(Path(path)))
    plain = path.lower().replace("_", "-")
    for name, shape in PUBLISHED.items():
        if f"{name.lower()}-" in f"{plain}-".replace("/", "-"):
            return shape
    raise ConfigError(
        f"the shape of model.path = {path!r} is unknown: the folder does not exist, and its name contains none of "
        f"{', '.join(PUBLISHED)}. Download the model's config.json into a folder, or add the name of its base model "
        "to the path."
    )
