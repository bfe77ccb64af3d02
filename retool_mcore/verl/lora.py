"""[lora] on verl's Megatron engine: adapters in its model, its checkpoints and its reference.

verl's own adapters on Megatron need Megatron-Bridge. ``attach`` puts ours into its engine; the keys
that they come by are at the end of verl/keys/engine.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.config.lora import FP8
from retool_mcore.model.adapter import peft_config, read_adapter, write_adapter
from retool_mcore.platforms.lora import AdaptedBridge, Adapters, gather, load, switched_off


def attach(engine: Any) -> None:
    """Make verl's ``engine`` train adapters, if its model's configuration asks for them.

    Call it before the engine is initialized.
    """
    if engine.model_config.lora_rank:
        engine.adapters = EngineAdapters(engine)


class EngineAdapters:
    """What an engine with adapters does otherwise."""

    def __init__(self, engine: Any) -> None:
        model = engine.model_config
        self._engine, self._base = engine, model.path
        self._adapters = Adapters(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            dropout=model.lora.get("dropout", 0.0),
            matrices=tuple(model.target_modules),
            seed=engine.engine_config.seed,
            base_in_fp8=model.lora.get("base_precision") == FP8,
        )
        self._build_module, self._initialize = engine._build_megatron_module, engine.initialize
        engine._build_megatron_module, engine.initialize = self._build, self._start
        engine.disable_adapter = self.switched_off

    def _build(self) -> Any:
        AdaptedBridge(self._engine.bridge, self._adapters)
        return self._build_module()

    def _start(self) -> None:
        self._initialize()
        if not self._engine.engine_config.forward_only:
            self.keep_to_adapters()

    def keep_to_adapters(self) -> None:
        """The engine's checkpoints hold adapters where others hold a model."""
        self._engine.bridge.save_weights, self._engine.bridge.load_weights = self.save, self.load

    def switched_off(self) -> AbstractContextManager[None]:
        return switched_off(self._engine.module)

    def staged(self, path: str) -> Callable[[], None] | None:
        """The adapters on the host, and on rank 0 what writes them into ``path``. Collective."""
        import torch.distributed as dist

        pairs = gather(self._engine.module)
        if dist.get_rank() != 0:
            return None
        a = self._adapters
        config = peft_config(self._base, rank=a.rank, alpha=a.alpha, dropout=a.dropout, matrices=a.matrices)
        weights = {name: (A.cpu(), B.cpu()) for name, (A, B) in pairs.items()}
        return partial(write_adapter, path, weights, config, base_in_fp8=a.base_in_fp8)

    def save(self, models: Any, weights_path: str) -> None:
        if job := self.staged(weights_path):
            job()

    def load(self, models: Any, weights_path: str) -> None:
        """Raises CheckpointError for adapters of another base."""
        load(self._engine.module, read_adapter(Path(weights_path), self._base)[0])
