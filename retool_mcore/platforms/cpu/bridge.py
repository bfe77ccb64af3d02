"""Imports Megatron-Bridge where Transformer Engine is not installed."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch

CORE = (  # modules that look for Transformer Engine when they are imported
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.optimizer",
    "megatron.training",
)


def import_bridge() -> None:
    """Import Megatron-Bridge, whose own adapters import Transformer Engine without a check.

    Where it is not installed, they see empty classes. Megatron-core must not see them, so it is
    imported before.
    """
    for name in CORE:
        import_module(name)
    absent = type("Absent", (torch.nn.Module,), {})
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    vars(package).update(__path__=[], pytorch=pytorch)
    layers = dict.fromkeys(("Linear", "LayerNormLinear", "GroupedLinear"), absent)
    vars(pytorch).update(layers, ops=SimpleNamespace(Sequential=absent))
    stubs = {module.__name__: module for module in (package, pytorch) if find_spec("transformer_engine") is None}
    sys.modules.update(stubs)
    try:
        import_module("megatron.bridge")
    finally:
        for name in stubs:
            del sys.modules[name]
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    for name, sharding in {"ColumnExperts": "column", "RowExperts": "row"}.items():  # cpu/layers.py
        AutoMapping.register_module_type(name, sharding)
