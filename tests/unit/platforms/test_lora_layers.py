"""Adapters on one layer equal the merged product, also on Transformer Engine's fused layer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")

HEADS, GROUPS, WIDTH, HIDDEN, FFN = 4, 2, 3, 6, 5  # 2 query heads a group
CONFIG = SimpleNamespace(sequence_parallel=False, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=WIDTH)


class Plain(torch.nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))
        self.config = CONFIG

    def forward(self, x: torch.Tensor) -> tuple[Any, None]:
        return torch.nn.functional.linear(x, self.weight), None


class Fused(Plain):
    """A fused norm and linear, as in Transformer Engine; may also return the norm's output."""

    return_layernorm_output = False

    def forward(self, x: torch.Tensor) -> tuple[Any, None]:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        output = torch.nn.functional.linear(normed, self.weight)
        return ((output, normed) if self.return_layernorm_output else output), None


class Chunk(torch.nn.Module):
    """The parts of a model that `adapt` reads: one layer and the embedding."""

    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        layer: Any = torch.nn.Module()
        layer.layer_number, layer.config = 3, CONFIG
        layer.self_attention, layer.mlp = torch.nn.Module(), torch.nn.Module()
        layer.self_attention.linear_qkv = kind((HEADS + 2 * GROUPS) * WIDTH, HIDDEN)
        layer.self_attention.linear_proj = Plain(HIDDEN, HEADS * WIDTH)
        layer.mlp.linear_fc1, layer.mlp.linear_fc2 = kind(2 * FFN, HIDDEN), Plain(HIDDEN, FFN)
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])
        self.embedding, self.pre_process = torch.nn.Embedding(7, HIDDEN), True


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)


def adapted(kind: type[Plain], *matrices: str, dropout: float = 0.0) -> Any:
    from retool_mcore.platforms.lora import LoraSettings, adapt, factors_of

    chunk = Chunk(kind)
    adapt(chunk, LoraSettings(rank=2, alpha=3, dropout=dropout, matrices=matrices, seed=1))
    for factor in factors_of([chunk]):
        torch.nn.init.normal_(factor.B)
    return chunk


def product(layer: Any, name: str) -> torch.Tensor:
    factor = layer.adapter.factors[name]
    return 1.5 * factor.B @ factor.A


def test_queries_keys_and_values_alternate_by_query_group_on_the_norms_output(alone: None):
    from retool_mcore.platforms.lora import switched_off

    chunk = adapted(Fused, "q_proj", "v_proj")
    layer = chunk.decoder.layers[0].self_attention.linear_qkv
    q, v = product(layer, "q_proj"), product(layer, "v_proj")
    rows: list[torch.Tensor] = []
    for group in range(GROUPS):
        rows += [q[group * 2 * WIDTH : (group + 1) * 2 * WIDTH], torch.zeros(WIDTH, HIDDEN)]
        rows += [v[group * WIDTH : (group + 1) * WIDTH]]
    x = torch.randn(4, 2, HIDDEN)
    taken = torch.nn.functional.rms_norm(x, (HIDDEN,))
    output, bias = layer(x)
    torch.testing.assert_close(output, torch.nn.functional.linear(taken, layer.weight + torch.cat(rows)))
    assert bias is None
    with switched_off([chunk]):
        torch.testing.assert_close(layer(x)[0], torch.nn.functional.linear(taken, layer.weight), rtol=0, atol=0)
    assert torch.equal(layer(x)[0], output), "adapters are on again"


def test_adapters_start_as_pefts_by_the_seed_and_the_matrix(alone: None):
    """Uniform within 1 / sqrt(in)."""
    from retool_mcore.platforms.lora import LoraSettings, adapt, factors_of

    made: list[torch.Tensor] = []
    for seed in (1, 1, 2):
        settings = LoraSettings(rank=400, alpha=3, dropout=0.0, matrices=("q_proj", "v_proj"), seed=seed)
        adapt(chunk := Chunk(Plain), settings)
        q, v = factors_of([chunk])
        assert 0.98 < float(q.A.abs().max()) * HIDDEN**0.5 <= 1 and not q.B.any() and not torch.equal(q.A, v.A)
        made.append(q.A)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_dropout_applies_in_training_only(alone: None):
    layer = adapted(Plain, "gate_proj", dropout=0.5).decoder.layers[0].mlp.linear_fc1
    x = torch.randn(4, 2, HIDDEN)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()
    torch.nn.init.zeros_(layer.adapter.factors["gate_proj"].B)
    assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight)), "of the adapter's input alone"
