"""algorithm.old_log_prob = "rollout": the same gradient as with a pass of its own, where a step is
one update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.tensors import trained_tensors
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.ppo import ppo_tree
from retool_mcore.verl.plugin import assert_loaded

TINY = Path(__file__).parents[2] / "configs" / "rl_tiny_cpu.toml"


@pytest.fixture(autouse=True, scope="module")
def verl_imports_here() -> None:
    get_platform("cpu").activate()
    assert_loaded()


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
    weighted = (f"algorithm.importance_sampling={level}", "algorithm.importance_threshold=2.0")
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.mini_batch_prompts=6",), "is for one update a step, and train.prompts_per_step = 12 /"),
        (("model.fp8=tensorwise",), 'Set algorithm.importance_sampling = "token"'),
    ],
)
def test_where_it_would_be_wrong_it_is_refused(settings: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=r"algorithm\.old_log_prob") as caught:
        load_config(RlConfig, TINY, ["algorithm.old_log_prob=rollout", *settings])
    assert message in str(caught.value)


def test_experts_need_importance_sampling(tmp_path: Path):
    from safetensors.numpy import save_file

    values: dict[str, Any] = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 8, "num_experts": 4, "vocab_size": 16,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 4, "head_dim": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({name: np.zeros(1, np.float32) for name in trained_tensors(values)}, tmp_path / "model.safetensors")
    settings = [f"model.path={tmp_path}", "algorithm.old_log_prob=rollout"]
    with pytest.raises(ConfigError, match=r'has experts.*Set algorithm\.importance_sampling = "token"'):
        check_model(load_config(RlConfig, TINY, settings))
    check_model(load_config(RlConfig, TINY, [*settings, "algorithm.importance_sampling=token"]))
    replay = "algorithm.router_replay=R3"
    check_model(load_config(RlConfig, TINY, [*settings, "algorithm.importance_sampling=token", replay]))
