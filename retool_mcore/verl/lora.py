"""Adds LoRA adapters ([lora]) to verl's Megatron engine: its model, checkpoints and reference.

Megatron-Bridge's own adapters need Transformer Engine, so ``attach`` adds ours, whose keys in
verl's tree are in verl/keys/engine.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.config.lora import FP8
from retool_mcore.model.adapter import peft_config, read_adapter, write_adapter
from retool_mcore.platforms.lora import AdaptedBridge, LoraSettings, gather, load, switched_off


def attach(engine: Any) -> None:
    """Make verl's ``engine`` train adapters if its model config has ``lora_rank`` > 0.

    Call it before ``engine.initialize``.
    """
    if engine.model_config.lora_rank:
        engine.adapters = EngineAdapters(engine)


class EngineAdapters:
    """Overrides of verl's engine for a model with adapters."""

    def __init__(self, engine: Any) -> None:
        model = engine.model_config
        self._engine, self._base = engine, model.path
        self._settings = LoraSettings(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            dropout=model.lora.get("dropout", 0.0),
            matrices=tuple(model.target_modules),
            seed=engine.engine_config.seed,
            base_in_fp8=model.lora.get("base_precision") == FP8,
        )
        self._build_module, self._initialize = engine._build_megatron_module, engine.initialize
        engine._build_megatron_module, engine.initialize = self._build, self._start
        engine.disable_adapter = lambda: switched_off(engine.module)

    def _build(self) -> Any:
        AdaptedBridge(self._engine.bridge, self._engine.provider, self._settings)
        return self._build_module()

    def _start(self) -> None:
        self._initialize()
        if not self._engine.engine_config.forward_only:
            self._engine.bridge.load_hf_weights = self.load  # a checkpoint has the adapters instead of the whole model

    def staged(self, path: str) -> Callable[[], None] | None:
        """Copy the adapters to the host. Collective.

        Returns, on rank 0 only, the function that writes them into the folder ``path``.
        """
        import torch.distributed as dist

        pairs = gather(self._engine.module)
        if dist.get_rank() != 0:
            return None
        settings = self._settings
        config = peft_config(
            self._base, rank=settings.rank, alpha=settings.alpha, dropout=settings.dropout, matrices=settings.matrices
        )
        weights = {name: (A.cpu(), B.cpu()) for name, (A, B) in pairs.items()}
        return partial(write_adapter, path, weights, config, base_in_fp8=settings.base_in_fp8)

    def load(self, models: Any, weights_path: str, **_: Any) -> None:
        """Load adapters from a folder. Raises CheckpointError if their base model differs."""
        load(self._engine.module, read_adapter(Path(weights_path), self._base)[0])
