"""Checks that a checkpoint has exactly the tensors that training reads and writes.

The Megatron bridge silently skips tensors with unknown names, and thus a part of the model.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.errors import CheckpointError
from retool_mcore.model.files import INDEX, safe_open, tensor_files
from retool_mcore.model.shape import ModelShape, shape_of_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNREAD = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old Llama files; computed from the config
DTYPES = ("BF16", "F16", "F32")  # as safetensors names them
ALIKE = 0.999  # minimum cosine similarity of two untrained rows
MANY = 100  # a row that is similar to more rows than this is untrained


def trained_tensors(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that training reads, for a supported config.json."""
    shape, kind = shape_of_config(values), values["model_type"]
    tensors = {EMBEDDING: (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    if not shape.tied:
        tensors[HEAD] = (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        tensors |= {f"model.layers.{layer}.{name}": size for name, size in _layer(kind, shape)}
    return tensors


def _layer(kind: str, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden
    rows = {"q": shape.heads * shape.head_dim, **dict.fromkeys("kv", shape.kv_heads * shape.head_dim)}
    yield from ((f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
    yield from ((f"self_attn.{name}_proj.weight", (count, hidden)) for name, count in rows.items())
    yield "self_attn.o_proj.weight", (hidden, rows["q"])
    if kind == "qwen2":
        yield from ((f"self_attn.{name}_proj.bias", (count,)) for name, count in rows.items())
    if kind.startswith("qwen3"):
        yield from ((f"self_attn.{name}_norm.weight", (shape.head_dim,)) for name in "qk")
    parts = [f"mlp.experts.{number}" for number in range(shape.experts)] or ["mlp"]
    if shape.experts:
        yield "mlp.gate.weight", (shape.experts, hidden)
    for part in parts:
        yield from ((f"{part}.{name}_proj.weight", (shape.ffn, hidden)) for name in ("gate", "up"))
        yield f"{part}.down_proj.weight", (hidden, shape.ffn)


def check_tensors(names: Collection[str], values: Mapping[str, Any], model: str) -> None:
    """Raise CheckpointError unless a checkpoint has exactly the tensors that training reads.

    Accepts two extras: the output matrix of a tied model, and RoPE frequencies in old files.
    """
    wanted, present = trained_tensors(values).keys(), set(names)
    tied = {HEAD} if HEAD not in wanted else set[str]()
    unknown = sorted(name for name in present - wanted - tied if not UNREAD.fullmatch(name))
    for different, verb, why in (
        (unknown, "has", "which training would ignore"),
        (sorted(wanted - present), "lacks", "which training needs"),
    ):
        if different:
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            raise CheckpointError(
                f"the checkpoint {model} {verb} {', '.join(different[:3])}{more}, {why} according to its config.json "
                f"(model_type {values['model_type']}). Use the checkpoint and the config.json of the same model, or "
                "another model."
            )


def check_headers(folder: Path, files: Mapping[str, str], wanted: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Raise CheckpointError for a tensor with a wrong shape or dtype in its file's header.

    ``files``: tensor name -> file in ``folder``; skips files that are missing from the hub cache,
    which are downloaded later. ``wanted``: tensor name -> shape.
    """
    for file in sorted({files[name] for name in wanted if (folder / files[name]).exists()}):
        with safe_open()(folder / file, "pt") as opened:
            present = set(opened.keys())
            for name in sorted(name for name in wanted if files[name] == file):
                if name not in present:
                    raise CheckpointError(
                        f"{folder / INDEX} lists {name} in {file}, which does not have it. Copy or fetch the index and "
                        "its files again."
                    )
                matrix = opened.get_slice(name)
                shape, dtype = tuple(matrix.get_shape()), matrix.get_dtype()
                if shape != wanted[name]:
                    raise CheckpointError(
                        f"{folder / file} has {name} of shape {list(shape)}, but the shape must be "
                        f"{list(wanted[name])} according to the config.json of {model}. Use the checkpoint and the "
                        "config.json of the same model."
                    )
                if dtype not in DTYPES:
                    raise CheckpointError(
                        f"{folder / file} has {name} as {dtype}, so {model} is a quantized checkpoint. Training reads "
                        f"only {', '.join(DTYPES)}. Use the checkpoint from which it was quantized."
                    )


def missing_tensors(source: Path, weights: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a model directory that training does not read, for a complete export.

    ``weights``: the trained tensors. A tied model's output matrix is a copy of the trained
    embedding.
    """
    folder, files = tensor_files(str(source)) or (source, {})
    for name in files.keys() - weights.keys():
        if name == HEAD:
            yield name, weights[EMBEDDING].clone()
        elif UNREAD.fullmatch(name):
            with safe_open()(folder / files[name], "pt") as file:
                yield name, file.get_tensor(name)


def same_tensor(folder: Path, files: Mapping[str, str], name: str, other: str) -> bool:
    """Whether two tensors of a checkpoint are equal. ``files``: tensor name -> file."""
    import torch

    opened = safe_open()
    with opened(folder / files[name], "pt") as first, opened(folder / files[other], "pt") as second:
        return torch.equal(first.get_tensor(name), second.get_tensor(other))


def never_trained(model: str, token_ids: Sequence[int]) -> list[int] | None:
    """The ``token_ids`` whose row [H] in the output matrix [V, H] nearly equals many other rows.

    Such a token was never trained: the model samples it about as often as any of those. In
    Qwen2.5-Coder-0.5B-Instruct, the rows of <tool_call> and </tool_call> are similar to 6,088
    others. ``model``: a directory or hub name. Returns None if its weights are not available
    locally. Raises CheckpointError if they are unreadable.
    """
    import torch
    from safetensors import SafetensorError

    try:
        located = tensor_files(model)
        if located is None:
            return None
        folder, files = located
        name = HEAD if HEAD in files else EMBEDDING
        with safe_open()(folder / files[name], "pt") as file:
            rows_VH: torch.Tensor = torch.nn.functional.normalize(file.get_tensor(name).float(), dim=-1)
    except FileNotFoundError:
        return None
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the weights of {model} cannot be read: {error}") from error
    return [token_id for token_id in token_ids if int((rows_VH @ rows_VH[token_id] > ALIKE).sum()) > MANY]
