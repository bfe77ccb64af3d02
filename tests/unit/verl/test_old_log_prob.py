"""algorithm.old_log_prob = "rollout": the same gradient as with a pass of its own in a step's first
update, and in later ones the loss that its page names.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.tensors import trained_tensors
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.tree import ppo_tree
from tests.unit.verl.loss_scenario import ENGINE_BT, MASK_BT, by_formula, learn

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
TINY = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"


def gradient(rollout_BT: torch.Tensor, actor_BT: torch.Tensor, *settings: str) -> torch.Tensor:
    """Of the policy loss with respect to the actor's log-probabilities [B, T], by verl's own
    functions.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.config import omega_conf_to_dataclass

    tree = ppo_tree(load_config(RlConfig, TINY, settings), get_platform("cpu"))
    actor: Any = omega_conf_to_dataclass(tree.actor_rollout_ref.actor)
    correction = tree.algorithm.rollout_correction
    advantages_BT = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    logprobs_BT = actor_BT.clone().requires_grad_()
    weights_BT, old_BT = None, rollout_BT
    if not correction.bypass_mode:  # as verl's trainer: an old pass of the actor, and weights from it
        old_BT = actor_BT
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=actor_BT,
            rollout_log_prob=rollout_BT,
            response_mask=mask_BT,
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
        )
        weights_BT = weights.batch["rollout_is_weights"] if weights is not None else None
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old_BT,
        log_prob=logprobs_BT,
        advantages=advantages_BT,
        response_mask=mask_BT,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=weights_BT,
    )
    loss.backward()
    assert logprobs_BT.grad is not None
    return logprobs_BT.grad


ACTOR_BT = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, -9.0]])
ROLLOUT_BT = ACTOR_BT + torch.tensor([[0.05, -1.5, 0.0], [-0.02, 0.4, 5.0]])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_it_has_the_gradient_of_a_pass_of_its_own(level: str):
    weighted = (f"algorithm.importance_sampling={level}", "algorithm.importance_bounds=[0, 2.0]")
    own = gradient(ROLLOUT_BT, ACTOR_BT, *weighted)
    saved = gradient(ROLLOUT_BT, ACTOR_BT, *weighted, "algorithm.old_log_prob=rollout")
    torch.testing.assert_close(saved, own, atol=1e-7, rtol=0)
    if level == "token":  # written out: -advantage * min(ratio, 2) over the tokens that count
        ratio_BT = (ACTOR_BT - ROLLOUT_BT).exp().clamp(max=2.0)
        by_hand = -torch.tensor([[1.0], [-1.0]]) * ratio_BT * torch.tensor([[1.0, 1, 1], [1, 1, 0]]) / 5
        torch.testing.assert_close(saved, by_hand, atol=1e-6, rtol=0)


def test_unweighted_the_clipped_ratio_is_taken_to_the_engine():
    found = gradient(ROLLOUT_BT, ACTOR_BT, "algorithm.old_log_prob=rollout")
    ratio_BT = (ACTOR_BT - ROLLOUT_BT).exp()
    advantages_BT = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    clipped = ((advantages_BT > 0) & (ratio_BT > 1.28)) | ((advantages_BT < 0) & (ratio_BT < 0.8))
    by_hand = -advantages_BT * ratio_BT * ~clipped * torch.tensor([[1.0, 1, 1], [1, 1, 0]]) / 5
    torch.testing.assert_close(found, by_hand, atol=1e-6, rtol=0)
    assert not torch.allclose(found, gradient(ROLLOUT_BT, ACTOR_BT), atol=1e-3)


# A step of four updates. In a later one the weights have moved (loss_scenario.MOVED_BT).
FOUR_UPDATES = ("train.mini_batch_prompts=3", "algorithm.old_log_prob=rollout", "algorithm.clip=[0.2, 0.28, 3]")
ADVANTAGE_B1 = torch.tensor([[0.8], [-1.5], [-0.6], [1.1]])


def test_in_a_later_update_the_clipped_ratio_is_still_taken_to_the_engine():
    def objective(new_BT: torch.Tensor) -> torch.Tensor:
        ratio_BT = (new_BT - ENGINE_BT).exp()
        term_BT = torch.minimum(ratio_BT * ADVANTAGE_B1, ratio_BT.clamp(0.8, 1.28) * ADVANTAGE_B1)
        term_BT = torch.where(ADVANTAGE_B1 < 0, torch.maximum(term_BT, 3 * ADVANTAGE_B1), term_BT)  # dual clip
        return (term_BT * MASK_BT).sum() / MASK_BT.sum()

    compared(objective)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_in_a_later_update_weights_are_of_the_weights_of_that_update(level: str):
    def objective(new_BT: torch.Tensor) -> torch.Tensor:
        gap_BT = (new_BT.detach() - ENGINE_BT) * MASK_BT
        log_weight_BT = gap_BT if level == "token" else gap_BT.sum(1, keepdim=True).expand(4, 6)
        return (log_weight_BT.exp().clamp(max=2.0) * ADVANTAGE_B1 * new_BT * MASK_BT).sum() / MASK_BT.sum()

    settings = (f"algorithm.importance_sampling={level}", "algorithm.importance_bounds=[0, 2.0]")
    compared(objective, *(name for name in FOUR_UPDATES if "clip" not in name), *settings)


def compared(objective: Callable[[torch.Tensor], torch.Tensor], *settings: str) -> None:
    found = learn(*(settings or FOUR_UPDATES), advantages_BT=ADVANTAGE_B1.expand(4, 6), old_log_probs=ENGINE_BT)
    expected = by_formula(objective)
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-5)
    assert float(expected[1].abs().max()) > 1e-2


def test_with_fp8_it_needs_importance_sampling():
    message = r'algorithm\.old_log_prob.*Set algorithm\.importance_sampling = "token"'
    with pytest.raises(ConfigError, match=message):
        load_config(RlConfig, TINY, ["algorithm.old_log_prob=rollout", "model.fp8=tensorwise"])


def test_experts_need_importance_sampling(tmp_path: Path):
    from safetensors.numpy import save_file

    values: dict[str, Any] = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 8, "num_experts": 4, "vocab_size": 16,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 4, "head_dim": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {name: np.ones(shape, np.float32) for name, shape in trained_tensors(values).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = [f"model.path={tmp_path}", "algorithm.old_log_prob=rollout"]
    with pytest.raises(ConfigError, match=r'different experts\. Set algorithm\.importance_sampling = "token"'):
        check_model(load_config(RlConfig, TINY, settings))
    check_model(load_config(RlConfig, TINY, [*settings, "algorithm.importance_sampling=token"]))
    replay = "algorithm.router_replay=R3"
    check_model(load_config(RlConfig, TINY, [*settings, "algorithm.importance_sampling=token", replay]))
