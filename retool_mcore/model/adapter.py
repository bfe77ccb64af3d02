"""Reads, writes and merges LoRA adapters in PEFT's format; quantizes their frozen base to FP8.

adapter_model.safetensors   base_model.model.<matrix>.lora_A.weight [r, in] and lora_B [out, r]
adapter_config.json         PEFT's LoraConfig, which names the base model
adapter_base.json           hashes of the base's files, to detect a different base; "precision":
                            "fp8" if the base's layer matrices were rounded to FP8

In FP8 a matrix has float8_e4m3fn values and a power-of-two scale per row, which maps the row's
largest value to (224, 448]; 448 is the top of float8's range. Multiplying by a power of two is
exact, so dequantization adds no error in any dtype that can represent the result. float8_e4m3fn
has four significant bits, so the relative rounding error is at most 1/16, except for values below
2^-13 of their row's largest.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retool_mcore.errors import CheckpointError
from retool_mcore.model.files import INDEX, file_hash, safe_open, tensor_files, write_index, write_safetensors

if TYPE_CHECKING:
    import torch

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "adapter_base.json"
FILES = (WEIGHTS, CONFIG, BASE)
_PREFIX, _PRECISION = "base_model.model.", "precision"
LARGEST = 448.0  # largest finite value of float8_e4m3fn
_MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """weight [out, in] + scale * b [out, r] @ a [r, in], computed in float32 and rounded once."""
    return weight.float().addmm(b.float(), a.float(), alpha=scale).to(weight.dtype)


def peft_config(base: str, *, rank: int, alpha: float, dropout: float, matrices: Sequence[str]) -> dict[str, Any]:
    """PEFT's LoraConfig as a dict. ``base``: the run's model.path."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()) if Path(base).is_dir() else base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": list(matrices),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def base_hashes(model: str) -> dict[str, str]:
    """Hashes of a model's weight files (of both ends, see ``file_hash``) and of its config.json.

    {} for a hub name that is not in the cache.
    """
    located = tensor_files(model)
    if located is None:
        return {}
    folder, files = located
    return {name: file_hash(folder / name) for name in ("config.json", *sorted(set(files.values())))}


def write_adapter(
    folder: str,
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    base_in_fp8: bool = False,
) -> None:
    """Write adapters {matrix name: (A [r, in], B [out, r])}, unsharded and on the CPU."""
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{_PREFIX}{name}.lora_{letter}.weight": tensor.contiguous()
        for name, pair in weights.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    write_safetensors(to / WEIGHTS, tensors)
    (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    hashes = base_hashes(str(config["base_model_name_or_path"])) | ({_PRECISION: "fp8"} if base_in_fp8 else {})
    (to / BASE).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")


def is_adapter(folder: Path) -> bool:
    """Whether a weights folder contains an adapter rather than a full model."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path, model: str = "") -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
    """Read the adapters {matrix name: (A, B)} and PEFT's config from ``folder``.

    ``model``: the base to use them with; "" for the one in the config. Raises CheckpointError if
    the adapters were trained on a different base.
    """
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    hashes: dict[str, str] = json.loads((folder / BASE).read_text(encoding="utf-8"))
    hashes.pop(_PRECISION, None)
    named = str(config["base_model_name_or_path"])
    present = base_hashes(model or named)
    if differing := sorted(name for name in {**hashes, **present} if hashes.get(name) != present.get(name)):
        raise CheckpointError(
            f"the adapters in {folder} were trained on {named}, but {model or named} is a different or incomplete "
            f"model: {', '.join(differing[:3])} {'differs' if len(differing) == 1 else 'differ'}. Restore the original "
            "model, or start a new run with another run.name."
        )
    with safe_open()(folder / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    names = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}
    return {
        name: (tensors[f"{_PREFIX}{name}.lora_A.weight"], tensors[f"{_PREFIX}{name}.lora_B.weight"]) for name in names
    }, config


def merge(adapter: Path, to: Path) -> None:
    """Merge an adapter into its base and write the full model, in the adapter's dtype.

    Rounds the base's matrices to FP8 if training did. Loads one weight file of the base at a time.
    Copies the adapter folder's other files, such as the tokenizer, and the base's config.json.
    Raises CheckpointError.
    """
    pairs, config = read_adapter(adapter)
    located = tensor_files(str(config["base_model_name_or_path"]))
    assert located is not None, "its hashes were compared"
    base, files = located
    scale = config["lora_alpha"] / config["r"]
    dtype = next(iter(pairs.values()))[0].dtype
    in_fp8 = _PRECISION in json.loads((adapter / BASE).read_text(encoding="utf-8"))
    to.mkdir(parents=True, exist_ok=True)
    size = 0
    for shard in sorted(set(files.values())):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open()(base / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                weight = file.get_tensor(name).to(dtype)
                weight = rounded(weight) if in_fp8 and _MATRIX.fullmatch(name) else weight
                pair = pairs.get(name.removesuffix(".weight"))
                tensors[name] = weight if pair is None else merged(weight, *pair, scale)
        size += sum(tensor.nbytes for tensor in tensors.values())
        write_safetensors(to / shard, tensors)
    if (base / INDEX).is_file():
        write_index(to, files, size)
    for path in adapter.iterdir():
        if path.name not in FILES:
            shutil.copy2(path, to / path.name)
    shutil.copyfile(base / "config.json", to / "config.json")


def row_scales(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Power-of-two scales [rows, 1] in ``dtype``, from each row's largest absolute value [rows]."""
    import torch

    mantissa, exponent = torch.frexp(largest.float() / LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-100)  # an exact power of two needs no larger scale
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent).to(dtype)[:, None]


def to_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantize weight [rows, columns] to float8_e4m3fn with ``scales`` [rows, 1]."""
    import torch

    return (weight / scales).to(torch.float8_e4m3fn)


def from_fp8(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize ``to_fp8``'s result to the dtype of ``scales``. Allocates only the result."""
    return stored.to(scales.dtype).mul_(scales)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """weight [rows, columns] after quantization and dequantization, in its dtype."""
    scales = row_scales(weight.abs().amax(1), weight.dtype)
    return from_fp8(to_fp8(weight, scales), scales)
