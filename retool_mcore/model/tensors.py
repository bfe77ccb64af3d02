"""Checks that a checkpoint has exactly the tensors that training reads and writes.

The Megatron bridge silently skips tensors with unknown names, and thus a part of the model.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.errors import CheckpointError
from retool_mcore.model.files import INDEX, WHOLE, safe_open, tensor_files, write_index, write_safetensors
from retool_mcore.model.shape import FULL, HYBRID, LINEAR, DeltaShape, ModelShape, shape_of_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNREAD = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old Llama files; computed from the config
NESTED = "model.language_model."  # prefix of the text part in a vision model, and in what transformers saves of it
DTYPES = ("BF16", "F16", "F32")  # as safetensors names them
ALIKE = 0.999  # minimum cosine similarity of two untrained rows
MANY = 100  # a row that is similar to more rows than this is untrained


def trained_tensors(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that training reads, for a supported config.json."""
    shape, kind = shape_of_config(values), values["model_type"]
    tensors = {EMBEDDING: (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    if not shape.tied:
        tensors[HEAD] = (shape.vocab, shape.hidden)
    types: list[str] = values["layer_types"] if kind in HYBRID else [FULL] * shape.layers
    for layer, layer_type in enumerate(types):
        mixer = _delta(shape.hidden, shape.delta) if shape.delta and layer_type == LINEAR else _attention(kind, shape)
        tensors |= {f"model.layers.{layer}.{name}": size for name, size in (*mixer, *_mlp(kind, shape))}
    return tensors


Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _attention(kind: str, shape: ModelShape) -> Tensors:
    hidden, attended = shape.hidden, shape.heads * shape.head_dim
    rows = {"q": attended * (2 if shape.output_gate else 1), **dict.fromkeys("kv", shape.kv_heads * shape.head_dim)}
    yield from ((f"self_attn.{name}_proj.weight", (count, hidden)) for name, count in rows.items())
    yield "self_attn.o_proj.weight", (hidden, attended)
    if kind == "qwen2":
        yield from ((f"self_attn.{name}_proj.bias", (count,)) for name, count in rows.items())
    if kind.startswith("qwen3"):
        yield from ((f"self_attn.{name}_norm.weight", (shape.head_dim,)) for name in "qk")


def _delta(hidden: int, delta: DeltaShape) -> Tensors:
    """The tensors of a Gated DeltaNet layer: q, k and v, gate z, beta b, and decay a."""
    rows = {"qkv": 2 * delta.keys + delta.values, "z": delta.values, **dict.fromkeys("ba", delta.value_heads)}
    yield from ((f"linear_attn.in_proj_{name}.weight", (count, hidden)) for name, count in rows.items())
    yield "linear_attn.conv1d.weight", (rows["qkv"], 1, delta.kernel)
    yield from ((f"linear_attn.{name}", (delta.value_heads,)) for name in ("A_log", "dt_bias"))
    yield "linear_attn.norm.weight", (delta.value_dim,)
    yield "linear_attn.out_proj.weight", (hidden, delta.values)


def _mlp(kind: str, shape: ModelShape) -> Tensors:
    """The tensors of a layer's norms, and of its MLP or experts."""
    hidden = shape.hidden
    yield from ((f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
    if not shape.experts:
        yield from _gated("mlp", hidden, shape.ffn)
        return
    yield "mlp.gate.weight", (shape.experts, hidden)
    if kind not in HYBRID:
        for number in range(shape.experts):
            yield from _gated(f"mlp.experts.{number}", hidden, shape.ffn)
        return
    yield "mlp.experts.gate_up_proj", (shape.experts, 2 * shape.ffn, hidden)
    yield "mlp.experts.down_proj", (shape.experts, hidden, shape.ffn)
    yield from _gated("mlp.shared_expert", hidden, shape.shared_ffn)
    yield "mlp.shared_expert_gate.weight", (1, hidden)


def _gated(name: str, hidden: int, width: int) -> Tensors:
    yield from ((f"{name}.{part}_proj.weight", (width, hidden)) for part in ("gate", "up"))
    yield f"{name}.down_proj.weight", (hidden, width)


def check_tensors(names: Collection[str], values: Mapping[str, Any], model: str) -> None:
    """Raise CheckpointError unless a checkpoint has exactly the tensors that training reads.

    Accepts two extras: the output matrix of a tied model, and RoPE frequencies in old files.
    """
    wanted, present = trained_tensors(values).keys(), set(names)
    if any(name.startswith(NESTED) for name in present):
        raise CheckpointError(
            f"the checkpoint {model} has the tensor names of a vision model ({NESTED}...), which training would "
            f"ignore. Write a folder of its text part: `retool data model {model} {Path(model).name}-text`."
        )
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


def write_tensors(folder: Path, tensors: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Write a checkpoint's tensors, with an index if they are in several files.

    ``files``: tensor name -> file; tensors without one are in model.safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(files.get(name, WHOLE), {})[name] = tensor.contiguous()
    for file, contents in by_file.items():
        write_safetensors(folder / file, contents)
    if len(by_file) > 1:
        weight_map = {name: file for file, contents in by_file.items() for name in contents}
        size = sum(tensor.nbytes for tensor in tensors.values())
        write_index(folder, weight_map, size)


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
        name = next((name for name in (HEAD, EMBEDDING) if name in files), NESTED + EMBEDDING.removeprefix("model."))
        with safe_open()(folder / files[name], "pt") as file:
            rows_VH: torch.Tensor = torch.nn.functional.normalize(file.get_tensor(name).float(), dim=-1)
    except FileNotFoundError:
        return None
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the weights of {model} cannot be read: {error}") from error
    return [token_id for token_id in token_ids if int((rows_VH @ rows_VH[token_id] > ALIKE).sum()) > MANY]
