"""Writes the text part of a vision model as a model folder for training: `retool data model`.

Qwen3.5 is published as vision models. Their text part has the tensors `model.language_model.*` and
`lm_head.weight`. The folder has them under the names of a text model, without the vision encoder
(`model.visual.*`) and the layers that predict several tokens (`mtp.*`). transformers reads a vision
model's folder as a text model, but saves it under the names of the vision model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retool_mcore.data.model_folder import is_made, written_at_once
from retool_mcore.errors import DataError
from retool_mcore.model.adapter import base_hashes
from retool_mcore.model.families import FAMILIES, VISION
from retool_mcore.model.files import INDEX, TEXTS, read_config, safe_open, tensor_files, write_index, write_safetensors
from retool_mcore.model.shape import FULL, LINEAR
from retool_mcore.model.tensors import NESTED, check_tensors

if TYPE_CHECKING:
    import torch

SOURCE_FILE = "text_model.json"
DROPPED = ("model.visual.", "mtp.")
TOKENIZER_CONFIG = "tokenizer_config.json"


def write_text_model(source: Path, directory: Path) -> bool:
    """Write the text part of the vision model in folder ``source`` to ``directory``, atomically.

    Copies the tokenizer, its template and the generation settings. Returns False if ``directory``
    was already made from ``source``. Raises CheckpointError if it contains something else or if
    tensors are missing, and DataError if ``source`` is not a vision model.
    """
    config = text_config(read_config(str(source)), source)
    origin = {"folder": source.name, **base_hashes(str(source))}
    if is_made(directory, SOURCE_FILE, origin):
        return False
    _, files = tensor_files(str(source)) or (source, {})
    renamed = {text_name(name): file for name, file in files.items() if not name.startswith(DROPPED)}
    check_tensors(renamed, config, str(source))
    with written_at_once(directory, SOURCE_FILE, origin) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_weights(source, renamed, folder)
        _copy_texts(source, folder)
    return True


def text_name(name: str) -> str:
    """The name in a text model of a vision model's tensor."""
    return f"model.{name.removeprefix(NESTED)}" if name.startswith(NESTED) else name


def text_config(values: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The config.json of a vision model's text part. Raises DataError for another model."""
    own_kind = str(values.get("model_type"))
    kind = VISION.get(own_kind, own_kind)
    if kind not in VISION.values():
        raise DataError(
            f"{source} has a model of model_type {own_kind!r}. This command takes a GGUF file, or the "
            f"folder of a vision model with model_type {' or '.join(VISION)}."
        )
    text: dict[str, Any] = values.get("text_config", values)
    own = ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")
    config = text | {name: values[name] for name in own if name in values}
    config = {name: value for name, value in config.items() if not name.startswith("mtp_")}
    if not config.get("layer_types"):  # transformers derives them in the same way
        interval = config.get("full_attention_interval", 4)
        numbers = range(1, config.get("num_hidden_layers", 0) + 1)
        config["layer_types"] = [LINEAR if number % interval else FULL for number in numbers]
    return config | {"architectures": [FAMILIES[kind].architecture], "model_type": kind}


def _write_weights(source: Path, files: Mapping[str, str], folder: Path) -> None:
    """Copy the tensors of ``files`` (text name -> file), one file at a time, with an index."""
    size = 0
    for file in sorted(set(files.values())):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open()(source / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                if files.get(text_name(name)) == file:
                    tensors[text_name(name)] = opened.get_tensor(name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        write_safetensors(folder / file, tensors)
    if (source / INDEX).is_file():
        write_index(folder, files, size)


def _copy_texts(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        written = path.name in ("config.json", INDEX) or "processor" in path.name  # processors prepare images
        if path.suffix in TEXTS and path.is_file() and not written:
            shutil.copy2(path, folder / path.name)
    file = folder / TOKENIZER_CONFIG
    if not file.is_file():
        return
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    settings.pop("processor_class", None)
    # transformers would build a named class, such as Qwen2Tokenizer, with that class's own
    # pre-tokenizer. This one has all of tokenizer.json.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
