"""Platform cuda's fused cross-entropy on a CPU: values and gradients against log_softmax, at any
temperature.

The function of a run; of its two kernels, and of verl's, cuda_twin.py has plain-torch twins. On the
real engine, with tensor parallelism: test_parallel_parity.py. With the kernels themselves:
tests/unit/platforms/test_cuda.py.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.nightly.numerics import cuda_twin

pytest.importorskip("megatron.core", reason="Megatron-core is not installed")
from retool_mcore.platforms.cuda import log_probs

T, H, V = 37, 16, 53
ONE = SimpleNamespace(size=lambda: 1)  # a group of one rank


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, cuda_twin.CROSS_ENTROPY, cuda_twin.transformer_engine_module())
    monkeypatch.setattr(log_probs, "ROWS", 8)  # several, and a rest


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden_TH, weight_VH = (torch.randn(rows, H).requires_grad_() for rows in (T, V))
    return hidden_TH, weight_VH, torch.randint(V, (T,))


def wanted(inputs: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_TH, weight_VH, labels_T = inputs
    log_probs_TV = torch.log_softmax(hidden_TH @ weight_VH.t() / temperature, -1)
    entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
    return log_probs_TV[torch.arange(T), labels_T], entropy_T


def found(inputs: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_TH, weight_VH, labels_T = inputs
    fused = log_probs.log_probs_by_transformer_engine(cuda_twin.linear_cross_entropy)
    return fused(hidden_TH[:, None], weight_VH, labels_T[None], temperature, "none", ONE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("policy", "bonus"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_values_and_gradients_are_those_of_a_softmax(inputs: Any, temperature: float, policy: float, bonus: float):
    upstream_T = torch.randn(T)

    def gradients(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        loss = (upstream_T * (policy * pair[0] + bonus * pair[1])).sum()
        return torch.autograd.grad(loss, inputs[:2])

    ours, theirs = found(inputs, temperature), wanted(inputs, temperature)
    for mine, other in zip((*ours, *gradients(ours)), (*theirs, *gradients(theirs)), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-5)


def test_entropies_are_the_same_without_a_gradient_and_leave_the_log_probabilities_alone(inputs: Any):
    expected = wanted(inputs, 1.0)
    with torch.no_grad():
        for mine, other in zip(found(inputs, 1.0), expected, strict=True):
            torch.testing.assert_close(mine, other.detach(), atol=1e-5, rtol=1e-5)


def test_sixteen_bit_logits_give_float32_entropies(inputs: Any):
    logits_TV = (inputs[0] @ inputs[1].t()).detach().bfloat16()
    before_TV = logits_TV.clone()
    expected_T = torch.distributions.Categorical(logits=logits_TV.float()).entropy()
    torch.testing.assert_close(log_probs.entropy(logits_TV, ONE), expected_T, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_TV, before_TV)


def test_entropies_cost_nothing_where_verl_does_not_ask_for_them(inputs: Any, monkeypatch: pytest.MonkeyPatch):
    """Through the function that verl's engine calls, which is told; an entropy that nobody asked
    for cannot be used.
    """
    given = []

    def forward(**_: Any) -> None:
        given.append(found(inputs, 1.0)[1])

    forward_of = log_probs.entropy_where_asked(lambda hf_config: forward)
    forward_of(None)(calculate_entropy=True)
    monkeypatch.setattr(log_probs, "entropy", None)
    forward_of(None)(calculate_entropy=False)
    torch.testing.assert_close(given[0], wanted(inputs, 1.0)[1], atol=1e-5, rtol=1e-5)
    assert given[1].isnan().all() and given[1].shape == (T,)
