"""Each setting of [algorithm] computes the formula of its paper.

Compares verl's functions, on our resolved tree, with each formula in a few lines of torch.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.verl.loss_scenario import (
    ADVANTAGE_B1,
    ENGINE_BT,
    MASK_BT,
    OLD_BT,
    REWARD_B,
    by_formula,
    learn,
    trained_on,
    tree,
)

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

Objective = Callable[[torch.Tensor], torch.Tensor]
COUNT_B = MASK_BT.sum(1)
CLIPS = ("algorithm.clip=[0.3, 0.4]",)


def same(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-5)
    assert float(expected[1].abs().max()) > 1e-3, "the formula has a gradient"
    assert not found[1][MASK_BT == 0].any(), "an interpreter's tokens have none"


def surrogate(ratio: torch.Tensor, low: float = 0.3, high: float = 0.4) -> torch.Tensor:
    """PPO, arXiv 1707.06347, Eq. 7; two clips as in DAPO, arXiv 2503.14476, Eq. 8."""
    return torch.minimum(ratio * ADVANTAGE_B1, ratio.clamp(1 - low, 1 + high) * ADVANTAGE_B1)


SUMS: dict[str, Objective] = {  # of every loss_agg: the objective [] of terms [B, T], by its full divisors
    "token-mean": lambda terms_BT: (terms_BT * MASK_BT).sum() / MASK_BT.sum(),
    "seq-mean-token-mean": lambda terms_BT: ((terms_BT * MASK_BT).sum(1) / COUNT_B).mean(),
    "seq-mean-token-sum": lambda terms_BT: (terms_BT * MASK_BT).sum(1).mean(),
    # Dr. GRPO, arXiv 2503.20783, Sec. 3.2: GRPO's sum over a response, without 1 / |o_i|. Its code
    # divides by the constant budget of a response instead (Listing 1).
    "seq-mean-token-sum-norm": lambda terms_BT: (terms_BT * MASK_BT).sum(1).mean() / 50,
}
token_mean = SUMS["token-mean"]


def ppo(new_BT: torch.Tensor) -> torch.Tensor:
    return token_mean(surrogate((new_BT - OLD_BT).exp()))


def dual_clip(new_BT: torch.Tensor) -> torch.Tensor:
    """Dual-clip PPO, arXiv 1912.09729, Eq. 5: what is worse counts at most 1.2 times."""
    terms_BT = surrogate((new_BT - OLD_BT).exp())
    return token_mean(torch.where(ADVANTAGE_B1 < 0, terms_BT.maximum(1.2 * ADVANTAGE_B1), terms_BT))


def gspo(new_BT: torch.Tensor) -> torch.Tensor:
    """GSPO, arXiv 2507.18071, Eq. 5 and 7: one ratio for a response."""
    ratio_B1 = (((new_BT - OLD_BT) * MASK_BT).sum(1) / COUNT_B).exp()[:, None]
    return surrogate(ratio_B1, 0.02, 0.03).mean()


def cispo(new_BT: torch.Tensor) -> torch.Tensor:
    """CISPO, arXiv 2506.13585, Eq. 4 and 5: the clipped ratio is a constant weight."""
    weight_BT = (new_BT - OLD_BT).exp().clamp(1 - 0.3, 1 + 0.4).detach()
    return token_mean(weight_BT * ADVANTAGE_B1 * new_BT)


def sapo(new_BT: torch.Tensor) -> torch.Tensor:
    """SAPO, arXiv 2511.20347, Eq. 5 and 6: a sigmoid gate of the ratio, by the advantage's sign."""
    tau_B1 = torch.where(ADVANTAGE_B1 > 0, 0.9, 1.3)
    gate_BT = torch.sigmoid(tau_B1 * ((new_BT - OLD_BT).exp() - 1)) * 4 / tau_B1
    return SUMS["seq-mean-token-mean"](gate_BT * ADVANTAGE_B1)


MEAN_OF_MEANS = "algorithm.loss_agg=seq-mean-token-mean"
LOSSES: dict[str, tuple[Objective, tuple[str, ...]]] = {
    "ppo": (ppo, CLIPS),
    "dual_clip": (dual_clip, ("algorithm.clip=[0.3, 0.4, 1.2]",)),
    "gspo": (gspo, ("algorithm.loss=gspo", MEAN_OF_MEANS, "algorithm.clip=[0.02, 0.03]")),
    "cispo": (cispo, ("algorithm.loss=cispo", *CLIPS)),
    "sapo": (sapo, ("algorithm.loss=sapo", MEAN_OF_MEANS, "algorithm.tau=[0.9, 1.3]")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_papers_also_over_masked_spans_and_micro_batches(name: str):
    formula, settings = LOSSES[name]
    same(learn(*settings), by_formula(formula))


INITIAL_BT = OLD_BT + 0.3 * torch.tensor([1.0, -2.0, 0.5, 1.0, -1.0, 2.0]) * (OLD_BT != 0)
# Schulman, "Approximating KL divergence" (2020): d is log p - log p_initial of a sampled token.
DIVERGENCES: dict[str, Objective] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "abs": torch.abs,
    "k1+": lambda d: d.detach() + d**2 / 2 - (d**2 / 2).detach(),
    "k3+": lambda d: (torch.exp(-d) - 1 + d).detach() + d**2 / 2 - (d**2 / 2).detach(),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_divergence_in_the_loss_is_the_chosen_estimate(kind: str):
    from verl.trainer.ppo.utils import need_reference_policy

    def objective(new_BT: torch.Tensor) -> torch.Tensor:
        return ppo(new_BT) - 0.25 * token_mean(DIVERGENCES[kind](new_BT - INITIAL_BT))

    settings = (*CLIPS, "algorithm.kl_coef=0.25", f"algorithm.kl_type={kind}")
    assert need_reference_policy(tree(*settings)) and not need_reference_policy(tree(*CLIPS))
    same(learn(*settings, ref_log_prob=INITIAL_BT), by_formula(objective))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_divergence_may_be_taken_off_the_reward_instead(kind: str, monkeypatch: pytest.MonkeyPatch):
    settings = ("algorithm.kl_coef=0.25", f"algorithm.kl_type={kind}", "algorithm.kl_in=reward")
    found_BT = trained_on(monkeypatch, "algorithm.name=rloo", *settings, ref_log_prob=INITIAL_BT)["advantages"]
    reward_B = REWARD_B - 0.25 * (DIVERGENCES[kind](OLD_BT - INITIAL_BT) * MASK_BT).sum(1)
    torch.testing.assert_close(found_BT, rloo_BT(reward_B))
    same(learn(*settings, *CLIPS, ref_log_prob=INITIAL_BT), learn(*CLIPS))


def of_group(values_B: torch.Tensor) -> torch.Tensor:
    """[B] the sums of the values in the groups, which are pairs."""
    return values_B.reshape(2, 2).sum(1).repeat_interleave(2)


def whitened(values_BT: torch.Tensor) -> torch.Tensor:
    of_tokens_N = values_BT[MASK_BT.bool()]
    return (values_BT - of_tokens_N.mean()) / of_tokens_N.std() * MASK_BT


def rloo_BT(reward_B: torch.Tensor = REWARD_B) -> torch.Tensor:
    """RLOO, arXiv 2402.14740, Sec. 3.3: minus the mean reward of the others of the group."""
    return (reward_B - reward_B[[1, 0, 3, 2]])[:, None] * MASK_BT


def opo_BT(mask_BT: torch.Tensor = MASK_BT) -> torch.Tensor:
    """OPO, arXiv 2505.23585, Eq. 9: the baseline is the mean reward weighted by length."""
    count_B = mask_BT.sum(1)
    baseline_B = of_group(count_B * REWARD_B) / of_group(count_B).clamp(min=1)
    return (REWARD_B - baseline_B)[:, None] * mask_BT


def dr_grpo_BT() -> torch.Tensor:
    """Dr. GRPO, arXiv 2503.20783, Sec. 3.2: the reward minus the group's mean, no more."""
    return (REWARD_B - of_group(REWARD_B) / 2)[:, None] * MASK_BT


def grpo_BT() -> torch.Tensor:
    """GRPO, arXiv 2402.03300, Sec. 4.1.2: divided by the group's deviation."""
    return dr_grpo_BT() / REWARD_B.reshape(2, 2).std(1).repeat_interleave(2)[:, None]


def reinforce_plus_plus_BT() -> torch.Tensor:
    """REINFORCE++, arXiv 2501.03262, Sec. 3: the discounted reward, normalized over the batch.

    The discount counts sampled tokens, not the interpreter's.
    """
    after_BT = MASK_BT.flip(1).cumsum(1).flip(1) - MASK_BT  # sampled tokens after this one
    return whitened(0.9**after_BT * REWARD_B[:, None] * MASK_BT)


ADVANTAGES = {
    "rloo": (rloo_BT, ("algorithm.name=rloo",)),
    "opo": (opo_BT, ("algorithm.name=opo",)),
    "grpo": (grpo_BT, ("algorithm.normalize_by_std=true",)),
    "dr_grpo": (dr_grpo_BT, ("algorithm.normalize_by_std=false",)),
    "reinforce_plus_plus": (reinforce_plus_plus_BT, ("algorithm.name=reinforce_plus_plus", "algorithm.gamma=0.9")),
    "reinforce_plus_plus_baseline": (
        lambda: whitened(dr_grpo_BT()),
        ("algorithm.name=reinforce_plus_plus_baseline",),
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_their_papers(name: str, monkeypatch: pytest.MonkeyPatch):
    formula, settings = ADVANTAGES[name]
    found_BT = trained_on(monkeypatch, *settings)["advantages"]
    torch.testing.assert_close(found_BT, formula(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("in_loss", [[1, 1, 0, 0], [1, 0, 1, 1]])
def test_opo_weighs_a_response_by_its_tokens_in_the_loss(in_loss: list[int], monkeypatch: pytest.MonkeyPatch):
    """Masked responses, and the rows that pad a batch in the place of dropped trajectories, have no
    gradient, so none of their reward is in a baseline. A whole group of them has advantage 0.
    """
    mask_BT = MASK_BT * torch.tensor(in_loss)[:, None]
    found_BT = trained_on(monkeypatch, "algorithm.name=opo", response_mask=mask_BT)["advantages"]
    torch.testing.assert_close(found_BT, opo_BT(mask_BT))
    assert found_BT.any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)])
def test_ppo_discounts_by_gamma_and_trusts_values_by_lambda(
    gamma: float, lam: float, monkeypatch: pytest.MonkeyPatch, model_dir: Path
):
    """GAE, arXiv 1506.02438, Eq. 11 and 16, over sampled tokens; normalized over the batch."""
    from verl.trainer.ppo.utils import need_critic

    values_BT = torch.linspace(-1, 1, 24).reshape(4, 6)
    expected_BT, returns_BT = torch.zeros(4, 6), torch.zeros(4, 6)
    for row in range(4):
        sampled = MASK_BT[row].nonzero().flatten().tolist()
        for place, start in enumerate(sampled):
            for steps, token in enumerate(sampled[place:]):
                last = token == sampled[-1]
                after = 0.0 if last else float(values_BT[row, sampled[place + steps + 1]])
                delta = (float(REWARD_B[row]) if last else 0.0) + gamma * after - float(values_BT[row, token])
                expected_BT[row, start] += (gamma * lam) ** steps * delta
            returns_BT[row, start] = expected_BT[row, start] + values_BT[row, start]
    settings = ("algorithm.name=ppo", f"algorithm.gamma={gamma}", f"algorithm.lam={lam}", f"model.path={model_dir}")
    assert need_critic(tree(*settings)) and not need_critic(tree("algorithm.name=grpo"))
    found = trained_on(monkeypatch, *settings, values=values_BT)
    torch.testing.assert_close(found["advantages"] * MASK_BT, whitened(expected_BT), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["returns"] * MASK_BT, returns_BT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.0, 1.03)])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_weights_outside_two_bounds_are_zero_and_with_one_are_cut_to_it(
    kind: str, low: float, high: float, monkeypatch: pytest.MonkeyPatch
):
    """IcePop, arXiv 2510.18855, Eq. 2: M(k) is k inside [alpha, beta] and 0 outside, k the ratio of
    trained weights to engine. Without a lower bound: truncated importance sampling."""
    settings = (f"algorithm.importance_sampling={kind}", f"algorithm.importance_bounds=[{low}, {high}]")
    assert "rollout_is_weights" not in trained_on(monkeypatch, "algorithm.importance_sampling=off")
    found = trained_on(monkeypatch, *settings)
    gap_BT = (OLD_BT - ENGINE_BT) * MASK_BT
    ratio_BT = (gap_BT if kind == "token" else gap_BT.sum(1, keepdim=True).expand(4, 6)).exp() * MASK_BT
    inside_BT = (ratio_BT >= low) & (ratio_BT <= high)
    expected_BT = torch.where(inside_BT, ratio_BT, 0.0) if low else ratio_BT.clamp(max=high)
    torch.testing.assert_close(found["rollout_is_weights"], expected_BT)
    left_out = ~inside_BT & MASK_BT.bool()
    assert left_out.any() and not left_out.all()
    weighted = learn(*CLIPS, rollout_is_weights=found["rollout_is_weights"])
    same(weighted, by_formula(lambda new_BT: token_mean(expected_BT * surrogate((new_BT - OLD_BT).exp()))))


# r is the engine's probability of a token over the trained weights'.
ESTIMATES: dict[str, Objective] = {
    "k1": lambda log_r: log_r,
    "k2": lambda log_r: log_r**2 / 2,
    "k3": lambda log_r: 1 / log_r.exp() - 1 + log_r,
}
OVER: dict[str, Objective] = {
    "token": lambda each_BT: each_BT,
    "seq_sum": lambda each_BT: (each_BT * MASK_BT).sum(1, keepdim=True).expand(4, 6),
    "seq_mean": lambda each_BT: ((each_BT * MASK_BT).sum(1) / COUNT_B)[:, None].expand(4, 6),
    "seq_max": lambda each_BT: each_BT.masked_fill(MASK_BT == 0, -math.inf).amax(1, keepdim=True).expand(4, 6),
}
REJECTIONS = [
    ("token_k1", 0.7, 2.0),
    ("token_k3", 0.0, 0.4),
    ("seq_sum_k2", 0.0, 0.5),
    ("seq_mean_k1", 0.999, 1.001),  # Geo-RS
    ("seq_max_k3", 0.0, 0.5),
]


def kept(kind: str, low: float, high: float, actor_BT: torch.Tensor = OLD_BT) -> torch.Tensor:
    over, _, estimate = kind.rpartition("_")
    judged_BT = OVER[over](ESTIMATES[estimate](ENGINE_BT - actor_BT))
    if estimate == "k1":
        kept_BT = (judged_BT >= math.log(low)) & (judged_BT <= math.log(high)) & MASK_BT.bool()
    else:
        kept_BT = (judged_BT <= high) & MASK_BT.bool()
    assert 0 < int(kept_BT.sum()) < int(MASK_BT.sum())
    return kept_BT


@pytest.mark.parametrize(("kind", "low", "high"), REJECTIONS)
def test_what_engine_and_actor_disagree_on_is_rejected(
    kind: str, low: float, high: float, monkeypatch: pytest.MonkeyPatch
):
    settings = [f"algorithm.rejection={kind}", f"algorithm.rejection_bounds=[{low}, {high}]"]
    found = trained_on(monkeypatch, *settings)
    assert torch.equal(found["response_mask"].bool(), kept(kind, low, high))
    assert torch.equal(found["advantages"] != 0, kept(kind, low, high)), "no advantage where rejected"


REJECTED_IN = [(kind, loss_agg) for kind in ("token_k2", "seq_max_k2") for loss_agg in SUMS]
REJECTED_IN.remove(("token_k2", "seq-mean-token-mean"))  # is refused: tests/unit/wrong_settings.toml


@pytest.mark.parametrize("engines", [False, True], ids=["actor", "rollout"])
@pytest.mark.parametrize(("kind", "loss_agg"), REJECTED_IN)
def test_what_is_rejected_still_counts_in_every_mean(
    kind: str, loss_agg: str, engines: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also where the loss itself rejects, with the engine's log-probabilities as the old ones."""
    high, agg = 0.35, (f"algorithm.loss_agg={loss_agg}", "rollout.max_response_tokens=50")
    settings = [*CLIPS, *agg, f"algorithm.rejection={kind}", f"algorithm.rejection_bounds=[0, {high}]"]
    old_BT = ENGINE_BT if engines else OLD_BT
    if engines:
        found = learn(*settings, "algorithm.old_log_prob=rollout", old_log_probs=ENGINE_BT)
    else:
        mask_BT = trained_on(monkeypatch, *settings)["response_mask"].long()
        found = learn(*settings, response_mask=mask_BT)

    def objective(new_BT: torch.Tensor) -> torch.Tensor:
        kept_BT = kept(kind, 0, high, new_BT.detach() if engines else OLD_BT)
        return SUMS[loss_agg](kept_BT * surrogate((new_BT - old_BT).exp()))

    same(found, by_formula(objective))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_in_the_loss_are_those_of_the_updates_own_weights(level: str):
    """With algorithm.old_log_prob = "rollout", a step of several updates compares each with the
    engine.
    """

    def objective(new_BT: torch.Tensor) -> torch.Tensor:
        gap_BT = (new_BT.detach() - ENGINE_BT) * MASK_BT
        log_weight_BT = gap_BT if level == "token" else gap_BT.sum(1, keepdim=True).expand(4, 6)
        return token_mean(log_weight_BT.exp().clamp(max=2.0) * ADVANTAGE_B1 * new_BT)

    settings = ("train.mini_batch_prompts=3", "algorithm.old_log_prob=rollout", "algorithm.importance_bounds=[0, 2.0]")
    found = learn(*settings, f"algorithm.importance_sampling={level}", old_log_probs=ENGINE_BT)
    same(found, by_formula(objective))
