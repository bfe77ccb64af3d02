"""Tokens that a model's training never met: their rows are like thousands of others."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from retool_mcore.errors import CheckpointError

ALIKE = 0.999  # cosine of two rows that no training has told apart
MANY = 100  # so many other rows are like a row that was never trained
OUTPUT_MATRICES = ("lm_head.weight", "model.embed_tokens.weight")  # the second where the two are tied


def never_trained(model: str, token_ids: Sequence[int]) -> list[int] | None:
    """Those of ``token_ids`` whose row [H] of the output matrix [V, H] is like many others.

    Such a token is as likely as each of the others until training tells them apart. In
    Qwen2.5-Coder-0.5B-Instruct the rows of <tool_call> and </tool_call> are like 6,088 others.
    ``model``: a folder or hub name. None: it has no weights, so nothing is known. Raises
    CheckpointError when the weights cannot be read.
    """
    import torch
    from safetensors import SafetensorError

    try:
        found = _output_matrix(model)
        if found is None:
            return None
        file, name = found
        with _open(file) as weights:
            rows_VH: torch.Tensor = weights.get_tensor(name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the weights of {model} cannot be read: {error}") from error
    rows_VH = torch.nn.functional.normalize(rows_VH.float(), dim=-1)
    return [each for each in token_ids if int((rows_VH @ rows_VH[each] > ALIKE).sum()) > MANY]


def _output_matrix(model: str) -> tuple[Path, str] | None:
    """The file that holds the output matrix, and the matrix's name in it."""
    index = _file(model, "model.safetensors.index.json")
    if index is not None:
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        name = next(name for name in OUTPUT_MATRICES if name in where)
        file = _file(model, where[name])
    else:
        file = _file(model, "model.safetensors")
        if file is None:
            return None
        with _open(file) as weights:
            named = set(weights.keys())
        name = next(name for name in OUTPUT_MATRICES if name in named)
    if file is None:
        raise OSError(f"the file with {name} is missing")
    return file, name


def _open(file: Path) -> Any:
    """The file of safetensors, whose tensors are read one by one; the library has no types."""
    from safetensors import safe_open

    return safe_open(file, "pt")


def _file(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    hub: Any = import_module("transformers.utils.hub")
    found = hub.cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
