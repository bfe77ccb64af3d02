"""Told to verl by VERL_USE_EXTERNAL_MODULES, imported in every process of a run: what each
optimizer update really saw.

Hooks of torch alone: of the model's forward passes under gradient, the token ids, and of each
optimizer step the settings that the optimizer holds. One file for each process under $UPDATE_PROBE,
one line for each update: {"rank", "role", "rows": token ids of each sequence, "lr", "betas",
"weight_decay", "frozen": objects that garbage collection skips}.
"""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    import pytest

FOLDER = "UPDATE_PROBE"
IMPORTED = 100_000  # objects at least, of what a trainer imports
ENVIRONMENT = "VERL_USE_EXTERNAL_MODULES"
_rows: dict[str, list[list[int]]] = {"actor": [], "critic": []}
_seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def probe(environment: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the commands that are started from here write what their updates see to ``folder``."""
    folder.mkdir()
    environment.setenv(FOLDER, str(folder))
    environment.setenv(ENVIRONMENT, __name__)
    environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")


def read_updates(folder: Path, role: str = "actor") -> list[list[dict[str, Any]]]:
    """Of each update, in order, what its ranks wrote."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        updates = [row for row in map(json.loads, path.read_text().splitlines()) if row["role"] == role]
        for number, update in enumerate(updates):
            found.setdefault(number, []).append(update)
    return [found[number] for number in sorted(found)]


def _see_model(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Torch's hook for all modules gets no keyword arguments, a module's own does, from the next
    call on.

    So the model's is set when what wraps it is called: else the first update of SFT would not be
    seen.
    """
    if module in _seen:
        return
    for part in module.modules():
        if type(part).__name__ == "GPTModel" and part is not module and part not in _seen:
            part.register_forward_pre_hook(_keep_rows, with_kwargs=True)
        _seen.add(part)


def _keep_rows(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    packed = kwargs["packed_seq_params"]
    ids = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).reshape(-1).tolist()
    starts = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
    lengths = packed.cu_seqlens_q.diff().tolist()
    role = "critic" if getattr(module, "output_layer", None) is None or _is_value_head(module) else "actor"
    _rows[role] += [ids[start : start + length] for start, length in zip(starts.tolist(), lengths, strict=False)]


def _is_value_head(module: torch.nn.Module) -> bool:
    weight = getattr(module.output_layer, "weight", None)
    return weight is not None and weight.shape[0] == 1


def _see_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    role = next((role for role, rows in _rows.items() if rows), None)
    if role is None:
        return
    group = optimizer.param_groups[0]
    line = {"rank": int(os.environ.get("RANK", "0")), "role": role, "rows": _rows[role]}
    line |= {"lr": float(group["lr"]), "betas": list(group["betas"]), "weight_decay": group["weight_decay"]}
    line["frozen"] = gc.get_freeze_count()
    with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    _rows[role] = []


if os.environ.get(FOLDER):
    register_module_forward_pre_hook(_see_model)
    register_optimizer_step_pre_hook(_see_update)
