"""Modes that sample ahead: settings that fit together, and the keys that verl gets."""

from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.cuda import platform as cuda
from retool_mcore.verl.keys.tree import ppo_keys

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
CONFIGS = Path(__file__).parents[3] / "configs"
TINY, LARGE = "rl_tiny_cpu", "rl_qwen2.5_7b_h200x8"
ASYNC = ("train.mode=async", "rollout.gpus=1", "cluster.gpus_per_node=2")


def rl(name: str, *settings: str) -> RlConfig:
    return load_config(RlConfig, CONFIGS / f"{name}.toml", settings)


def keys(config: RlConfig) -> dict[str, object]:
    return ppo_keys(config, get_platform(config.run.platform))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.mode=async",), 'train.mode = "async" and rollout.gpus = 0 are incompatible'),
        (("rollout.gpus=1", "cluster.gpus_per_node=2"), 'train.mode = "sync" and rollout.gpus = 1 are incompatible'),
        ((*ASYNC, "rollout.gpus=2"), "rollout.gpus = 2 leaves no GPU for training: [cluster] has 2 (1 nodes x 2). Low"),
        ((*ASYNC, "parallel.tp=2"), "= 2 does not divide the 1 GPUs of [cluster] (1 nodes x 2 less 1 of rollout.gpus)"),
        ((*ASYNC, "cluster.nodes=3"), "rollout.gpus = 1 is not a multiple of cluster.gpus_per_node = 2. With 3 nodes"),
        (("train.mode=partial_rollout", "train.prefetch_batches=8.0"), "train.max_staleness = 7 steps before they"),
    ],
)
def test_what_does_not_go_together_is_one_clear_error(settings: tuple[str, ...], message: str):
    with pytest.raises(ConfigError) as caught:
        rl(TINY, *settings)
    assert message in str(caught.value)


def test_one_node_is_divided_and_of_several_each_is_whole():
    one = rl(LARGE, "train.mode=async", "rollout.gpus=2", "parallel.tp=2", "parallel.cp=3")
    rollout = "actor_rollout_ref.rollout."
    assert (one.dp, one.train_gpus()) == (1, 6)
    four = rl(LARGE, "train.mode=async", "rollout.gpus=24", "cluster.nodes=4")
    found = keys(four)
    assert four.train_gpus() == 8
    assert (found["trainer.nnodes"], found["trainer.n_gpus_per_node"]) == (1, 8)
    assert (found[rollout + "nnodes"], found[rollout + "n_gpus_per_node"]) == (3, 8)


def test_cuda_says_what_its_transport_needs(monkeypatch: pytest.MonkeyPatch):
    config = rl(LARGE, "train.mode=async", "rollout.gpus=4")
    monkeypatch.setattr(cuda, "CUPY", "a_package_that_is_not_there")
    with pytest.raises(PlatformError, match=r'train\.mode = "async" sends weights with verl.s "nccl" engine'):
        get_platform("cuda").check_settings(config)
    monkeypatch.setattr(cuda, "CUPY", "json")
    get_platform("cuda").check_settings(config)
    assert keys(config)["actor_rollout_ref.rollout.checkpoint_engine.backend"] == "nccl"
