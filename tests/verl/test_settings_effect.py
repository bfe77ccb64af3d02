"""What [algorithm], [critic] and [optim] of an RL run do to advantages, losses and optimizers.

verl's own functions, on the objects that verl makes of our resolved tree; beside each the formula,
written out.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys import ppo
from retool_mcore.verl.keys.rollout import write_settings
from tests.reward.spellings import SLOW
from tests.verl.loss_scenario import KEYS, Queue, prepare_advantages

RL = Path(__file__).parents[2] / "configs" / "rl_tiny_cpu.toml"
# Two responses, of 3 and of 1 token; the first's second token is an interpreter's. Ratios 0.5, 1, 2
# and 30.
OLD = [[-2.0, -1.0, -3.0], [-5.0]]
NEW = [[-2.0 - math.log(2), -1.0, -3.0 + math.log(2)], [-5.0 + math.log(30)]]
MASK = [[1, 0, 1], [1]]
UP, DOWN = [[1.0, 1.0, 1.0], [1.0]], [[-1.0, -1.0, -1.0], [-1.0]]


HERE: list[str] = []  # the settings that name what the fixture has made


@pytest.fixture(autouse=True, scope="module")
def model_on_disk(verl_on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What verl's configuration of a critic reads; verl's defaults are composed once."""
    folder = tmp_path_factory.mktemp("settings")
    write_model(folder / "model", build_tokenizer(tokenizer_rows()), seed=0)
    HERE[:] = [f"model.path={folder}/model"]
    defaults = ppo.ppo_defaults()
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(ppo, "ppo_defaults", lambda: copy.deepcopy(defaults))
        yield


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        (("checkpoint.every_steps=3",), 3),
        (("checkpoint.every_steps=0", "train.steps=7"), 7),
        (("checkpoint.every_steps=0", "checkpoint.export=false"), -1),
    ],
)
def test_a_run_that_exports_saves_its_last_step_at_least(settings: tuple[str, ...], every: int):
    assert tree(*settings).trainer.save_freq == every


def tree(*settings: str) -> Any:
    """verl's resolved tree of the tiny run with ``settings``, as verl's trainer gets it."""
    from omegaconf import OmegaConf

    made = ppo.ppo_tree(load_config(RlConfig, RL, [*HERE, *settings]), get_platform("cpu"))
    return OmegaConf.create(OmegaConf.to_container(made, resolve=True))


def tree_of_run(*settings: str) -> Any:
    """``tree``, with the settings in the run's folder, where our parts read them."""
    config = load_config(RlConfig, RL, [*HERE, *settings])
    config.run.dir.mkdir(parents=True)
    write_settings(config)
    return tree(*settings)


def made_by_verl(part: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(copy.deepcopy(part))


def jagged(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def as_the_model_returns(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Of prompts of one token: a value at each position is for the token after it, the last one for
    none.
    """
    return torch.tensor([value for row in rows for value in (*row, -99.0)])


def batch(**columns: torch.Tensor) -> Any:
    """A whole batch in one micro-batch of one rank, as verl's engine hands it to a loss."""
    from verl.utils import tensordict_utils as tu

    mask = jagged(MASK, torch.int64)
    data = tu.get_tensordict(
        tensor_dict={
            "prompts": jagged([[7]] * len(MASK), torch.int64),
            "responses": jagged([[8] * len(row) for row in MASK], torch.int64),
            "response_mask": mask,
            **columns,
        },
        non_tensor_dict={"dp_size": 1, "batch_num_tokens": 3, "global_batch_size": 2},
    )
    return data


def policy_loss(*settings: str, advantages: Sequence[Sequence[float]] = UP, **columns: torch.Tensor) -> float:
    from verl.workers.utils.losses import ppo_loss

    actor = made_by_verl(tree(*settings).actor_rollout_ref.actor)
    data = batch(old_log_probs=jagged(OLD), advantages=jagged(advantages), **columns)
    loss, _ = ppo_loss(actor, {"log_probs": as_the_model_returns(NEW)}, data)
    return float(loss)


CLIPS = ("algorithm.clip=[0.3, 0.4, 5.0]",)


def test_a_ratio_is_clipped_on_either_side_where_the_run_file_says():
    # Likelier is better: 0.5 counts as it is, 2 and 30 at most as 1.4.
    assert policy_loss(*CLIPS) == pytest.approx(-(0.5 + 1.4 + 1.4) / 3)
    # Likelier is worse: 0.5 counts at least as 0.7, 2 as it is, 30 at most as 5.
    assert policy_loss(*CLIPS, advantages=DOWN) == pytest.approx((0.7 + 2.0 + 5.0) / 3)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (0.5 + 1.4 + 1.4) / 3),
        ("seq-mean-token-sum", ((0.5 + 1.4) + 1.4) / 2),
        ("seq-mean-token-mean", ((0.5 + 1.4) / 2 + 1.4) / 2),
    ],
)
def test_tokens_are_averaged_as_the_run_file_says(mode: str, expected: float):
    assert policy_loss(*CLIPS, f"algorithm.loss_agg={mode}") == pytest.approx(-expected)


def test_the_divergence_from_the_first_weights_has_its_weight_in_the_loss():
    from verl.trainer.ppo.utils import need_reference_policy

    reference = [[-1.0, -9.0, -3.0], [-4.0]]
    gaps = [
        ref - new
        for r, n, m in zip(reference, NEW, MASK, strict=True)
        for ref, new, k in zip(r, n, m, strict=True)
        if k
    ]
    divergence = sum(math.exp(gap) - gap - 1 for gap in gaps) / 3  # Schulman's estimate of KL(new, reference)
    for weight in (0.25, 0.0):
        settings = (*CLIPS, f"algorithm.kl_coef={weight}")
        found = policy_loss(*settings, ref_log_prob=jagged(reference))
        assert found == pytest.approx(-(0.5 + 1.4 + 1.4) / 3 + weight * divergence)
        assert need_reference_policy(tree(*settings)) == (weight > 0), "the first weights are kept where they are used"


def advantages(monkeypatch: pytest.MonkeyPatch, *settings: str) -> dict[str, list[torch.Tensor]]:
    """What our trainer writes back to the queue of two groups of two responses: advantages and
    weights.
    """
    queue = Queue(monkeypatch)
    for key, score, actor, engine in zip(KEYS, SCORES, ACTOR, ENGINE, strict=True):
        queue.rows[key] = {
            "response_mask": torch.ones(len(actor), dtype=torch.int64),
            "rm_scores": torch.tensor([0.0] * (len(actor) - 1) + [score]),
            "old_log_probs": torch.tensor(actor),
            "rollout_log_probs": torch.tensor(engine),
            "values": torch.zeros(len(actor)),
        }
    prepare_advantages(*settings)
    return {name: [queue.rows[key][name] for key in KEYS] for name in queue.rows[KEYS[0]]}


SCORES = [1.0, -1.0, 3.0, 1.0]
ENGINE = [[-1.0, -2.0, -3.0], [-1.0], [-1.0, -1.0], [-2.0, -2.0]]
ACTOR = [[-0.9, -2.3, -2.5], [0.0], [-1.0, -1.0], [-1.0, -3.0]]


def test_advantages_are_compared_within_groups_and_divided_by_the_deviation_where_asked(monkeypatch):
    plain = advantages(monkeypatch, "algorithm.normalize_by_std=false")["advantages"]
    assert [row.tolist() for row in plain] == [[1.0] * 3, [-1.0], [1.0] * 2, [-1.0] * 2]
    divided = advantages(monkeypatch, "algorithm.normalize_by_std=true")["advantages"]
    assert [row[0].item() for row in divided] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)] * 2, abs=1e-5)


def test_ppo_takes_advantages_from_values_and_trains_a_critic(monkeypatch):
    from verl.trainer.ppo.utils import need_critic

    found = advantages(monkeypatch, "algorithm.name=ppo")
    returns = [row.tolist() for row in found["returns"]]
    assert returns == [[score] * len(row) for score, row in zip(SCORES, returns, strict=True)], "undiscounted"
    assert need_critic(tree("algorithm.name=ppo")) and not need_critic(tree("algorithm.name=grpo"))


def test_importance_weights_are_those_of_tokens_or_of_whole_responses_up_to_the_threshold(monkeypatch):
    def weights(*settings: str) -> list[list[float]]:
        return [row.tolist() for row in advantages(monkeypatch, *settings)["rollout_is_weights"]]

    gaps = [[a - e for a, e in zip(actor, engine, strict=True)] for actor, engine in zip(ACTOR, ENGINE, strict=True)]
    for limit in (1.4, 10.0):
        threshold = f"algorithm.importance_bounds=[0, {limit}]"
        token = [[min(math.exp(gap), limit) for gap in row] for row in gaps]
        response = [[min(math.exp(sum(row)), limit)] * len(row) for row in gaps]
        for kind, expected in (("token", token), ("sequence", response)):
            found = weights(f"algorithm.importance_sampling={kind}", threshold)
            assert [value for row in found for value in row] == pytest.approx([v for row in expected for v in row])
    assert "rollout_is_weights" not in advantages(monkeypatch, "algorithm.importance_sampling=off")


def test_importance_weights_scale_the_loss_of_their_tokens():
    found = policy_loss(*CLIPS, rollout_is_weights=jagged([[2.0, 7.0, 0.5], [0.25]]))
    assert found == pytest.approx(-(2.0 * 0.5 + 0.5 * 1.4 + 0.25 * 1.4) / 3)


def test_a_value_moves_its_loss_up_to_the_clip():
    from verl.workers.utils.losses import value_loss

    critic = made_by_verl(tree("algorithm.name=ppo", "verl_overrides.critic.cliprange_value=0.3").critic)
    before, now, returns = [[0.0, 0.0, 0.0], [1.0]], [[1.0, 0.0, 0.2], [0.0]], [[1.0, 0.0, 1.0], [2.0]]
    data = batch(values=jagged(before), returns=jagged(returns))
    loss, _ = value_loss(critic, {"values": as_the_model_returns(now)}, data)
    # The first has moved by 1 where 0.3 counts: (0.3 - 1)^2; the third by 0.2; the fourth away from
    # its return.
    assert float(loss) == pytest.approx(0.5 * (0.7**2 + 0.8**2 + 2.0**2) / 3)


OPTIM = ("optim.lr=3e-4", "optim.min_lr=1e-5", "optim.weight_decay=0.07", "optim.clip_grad=0.4")


@pytest.mark.parametrize(
    ("role", "lr", "min_lr", "settings"),
    [
        ("actor_rollout_ref.actor", 3e-4, 1e-5, ()),
        ("critic", 2e-3, 1e-5, ("algorithm.name=ppo", "critic.lr=2e-3")),
        ("critic", 4e-6, 4e-6, ("algorithm.name=ppo", "critic.lr=4e-6")),  # below min_lr: constant
    ],
)
def test_megatrons_optimizer_is_made_with_the_run_files_values(
    role: str, lr: float, min_lr: float, settings: tuple[str, ...]
):
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    part = made_by_verl(OmegaConf.select(tree(*OPTIM, *settings), role))
    optim = init_megatron_optim_config(part.optim, fp16=False, bf16=False)
    assert (optim.optimizer, optim.lr, optim.min_lr) == ("adam", lr, min_lr)
    assert (optim.weight_decay, optim.clip_grad) == (0.07, 0.4)


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_its_least(role: str):
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

    settings = ("train.steps=20", "optim.warmup_fraction=0.25", "optim.schedule=cosine", "algorithm.name=ppo")
    one = ("train.prompts_per_step=8", "train.mini_batch_prompts=8", "critic.lr=3e-4")
    part = made_by_verl(OmegaConf.select(tree(*OPTIM, *settings, *one), role))
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    schedule = get_megatron_optimizer_param_scheduler(optimizer, part.optim)
    lrs = []
    for _ in range(20):
        schedule.step(1)
        lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs[:5] == pytest.approx([3e-4 * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)])
    fall = [1e-5 + (3e-4 - 1e-5) * 0.5 * (1 + math.cos(math.pi * step / 15)) for step in range(1, 16)]
    assert lrs[5:] == pytest.approx(fall)
    assert optimizer.param_groups[0]["weight_decay"] == 0.07


def test_log_probabilities_are_taken_at_the_temperature_that_was_sampled_at():
    """Of the update as of the pass before it: verl hands both to the workers with the batch."""
    from verl.trainer.ppo.v1 import trainer_base

    class Asked(Exception):
        """The workers would begin here."""

    def stop(batch: Any) -> Any:
        raise Asked

    workers = SimpleNamespace(compute_log_prob=stop, update_actor=stop)
    trainer = SimpleNamespace(config=tree("rollout.temperature=0.6"), actor_rollout_wg=workers)
    for method in ("_compute_old_log_prob", "_update_actor"):
        meta = SimpleNamespace(extra_info={}, keys=[], partition_id="train")
        with pytest.raises(Asked):
            getattr(trainer_base.PPOTrainer, method)(trainer, meta, {})
        assert meta.extra_info["temperature"] == 0.6


def test_groups_are_filtered_by_the_answers_and_not_by_the_shaped_reward(tmp_path: Path, monkeypatch):
    """Both kinds of group through verl's own filter, in the sampler that verl's trainer builds of
    our tree.
    """
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    settings = ("algorithm.filter_groups=10", "rollout.group_size=2", "reward.call_bonus=[0.1, -0.6]")
    trainer = SimpleNamespace(
        config=tree_of_run(*settings, f"run.root={tmp_path}"),
        trainer_mode="sync",
        _add_prompts_to_generate=lambda count: None,
    )
    sampler = trainer_base.PPOTrainer._build_replay_buffer(trainer)
    rows = {
        "allwrong_0_0": (0.0, -1.0),
        "allwrong_1_0": (0.0, -0.9),  # wrong as well, with a call's bonus
        "differ_0_0": (1.0, 0.5),
        "differ_1_0": (0.0, 0.5),  # another answer, and by its shaping the same reward
    }

    def get(keys: list[str], select_fields: list[str], **_: Any) -> dict[str, Any]:
        extras = [{"reward_extra_info": {"acc": rows[key][0], "score": rows[key][1]}} for key in keys]
        whole = {"extra_fields": extras, "rm_scores": [torch.tensor([0.0, rows[key][1]]) for key in keys]}
        return {name: whole[name] for name in select_fields}

    monkeypatch.setattr(replay_buffer, "tq", SimpleNamespace(kv_batch_get=get))
    sampler.partitions["train"] = {key: {} for key in rows}
    sampler.finished_keys["train"] = {"allwrong", "differ"}
    filtered, _ = sampler._dapo_filtered_keys("train")
    assert filtered == {"allwrong"}


def test_the_reward_that_verl_loads_is_the_runs_with_its_shaping(tmp_path: Path):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    settings = ("reward.answer=[2.0, -3.0]", "reward.call_bonus=[0.5, -1.5]")
    longest = ("reward.overlong_buffer_tokens=40", "rollout.max_response_tokens=200")
    made = get_custom_reward_fn(tree_of_run(*settings, *longest, f"run.root={tmp_path}"))
    assert made is not None

    def score(answer: str, calls: int, tokens: int) -> float:
        counts = {"calls": calls, "malformed": 0, "response_tokens": tokens}
        info = {"index": 0, "answer": answer, "behavior": counts}
        return made(data_source="math", solution_str="", ground_truth="34", extra_info=info)["score"]

    assert score("34", 0, 10) == 2.0
    assert score("35", 0, 10) == -3.0
    assert score("35", 2, 10) == -3.0 + 2 * 0.5
    assert score("35", 9, 10) == -1.5  # the cap
    assert score("34", 0, 180) == 2.0 - 0.5  # half of the last 40 of 200 tokens


def test_the_reward_checks_no_longer_than_the_run_allows(tmp_path: Path):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    answer, truth = SLOW
    made = get_custom_reward_fn(tree_of_run("reward.timeout_s=0.1", f"run.root={tmp_path}"))
    assert made is not None
    got = made(data_source="math", solution_str=f"\\boxed{{{answer}}}", ground_truth=truth, extra_info={})
    assert (got["score"], got["check_failed"]) == (-1.0, 1.0)


def test_the_router_remembers_as_many_trajectories_as_the_run_has_in_flight(tmp_path: Path):
    from omegaconf import OmegaConf

    from retool_mcore.verl.router import Router

    settings = [*HERE, "train.prompts_per_step=6000", "train.mini_batch_prompts=6000", f"run.root={tmp_path}"]
    made = tree_of_run(*settings[1:])
    file = OmegaConf.load(made.actor_rollout_ref.rollout.router_config_path)
    router = Router({"a": None, "b": None}, file)
    first = {name: router.acquire_server(name) for name in map(str, range(12_000))}
    assert {name: router.acquire_server(name) for name in first} == first
