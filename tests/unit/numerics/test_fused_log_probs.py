"""Platform cuda's fused cross-entropy on a CPU: values and gradients against log_softmax.

cuda_twin.py replaces the two kernels, and verl's, by plain torch. test_parallel_parity.py runs the
same in a real engine with tensor parallelism, and nightly/numerics/test_gpu_parity.py with the
kernels themselves.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity import cuda_twin

pytest.importorskip("megatron.core", reason="Megatron-core is not installed")
from retool_mcore.platforms.cuda import log_probs

T, H, V = 37, 16, 53
ONE = SimpleNamespace(size=lambda: 1)  # a group of one rank


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    monkeypatch.setitem(sys.modules, cuda_twin.CROSS_ENTROPY, cuda_twin.transformer_engine_module())
    monkeypatch.setattr(log_probs, "ROWS", 8)  # several, and a rest
    torch.manual_seed(0)
    hidden_TH, weight_VH = (torch.randn(rows, H).requires_grad_() for rows in (T, V))
    return hidden_TH, weight_VH, torch.randint(V, (T,))


def wanted(inputs: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_TH, weight_VH, labels_T = inputs
    log_probs_TV = torch.log_softmax(hidden_TH @ weight_VH.t() / temperature, -1)
    entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
    return log_probs_TV[torch.arange(T), labels_T], entropy_T


def found(inputs: Any, temperature: float, *, request_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, through the functions that verl's engine calls."""
    hidden_TH, weight_VH, labels_T = inputs
    fused = log_probs.log_probs_by_transformer_engine(cuda_twin.linear_cross_entropy)

    def forward(**_: Any) -> Any:
        return fused(hidden_TH[:, None], weight_VH, labels_T[None], temperature, "none", ONE)

    return log_probs.entropy_on_request(lambda hf_config: forward)(None)(calculate_entropy=request_entropy)


@pytest.mark.parametrize(("temperature", "request_entropy"), [(1.0, False), (0.7, False), (1.0, True)])
def test_values_and_gradients_equal_those_of_a_softmax(inputs: Any, temperature: float, request_entropy: bool):
    """Transformer Engine's kernel computes the first, and verl's the others."""
    used = 2 if (temperature, request_entropy) != (1.0, False) else 1  # entropies that nobody asked for are NaN
    upstream_T = torch.randn(T)
    results = []
    for each in (found(inputs, temperature, request_entropy=request_entropy), wanted(inputs, temperature)):
        loss = sum((upstream_T * part).sum() for part in each[:used])
        results.append((*each[:used], *torch.autograd.grad(loss, inputs[:2])))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-5)


def test_entropies_without_a_gradient_leave_the_log_probs_unchanged(inputs: Any):
    with torch.no_grad():
        for mine, other in zip(found(inputs, 1.0, request_entropy=True), wanted(inputs, 1.0), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        assert found(inputs, 1.0, request_entropy=False)[1].isnan().all(), "nobody asked for them"


def test_bfloat16_logits_give_float32_entropies(inputs: Any):
    logits_TV = (inputs[0] @ inputs[1].t()).detach().bfloat16()
    before_TV = logits_TV.clone()
    expected_T = torch.distributions.Categorical(logits=logits_TV.float()).entropy()
    torch.testing.assert_close(log_probs.entropy(logits_TV, ONE), expected_T, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_TV, before_TV)
