"""The router that keeps a trajectory on its engine."""

from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"


def test_the_router_remembers_every_trajectory_that_may_be_in_flight(monkeypatch: pytest.MonkeyPatch):
    """Of the step and of the batch beside it; verl's own number is 10,000."""
    from retool_mcore.verl import router

    run = load_config(RlConfig, RL, ["train.mode=partial_rollout", "train.prompts_per_step=1024",
                                     "train.mini_batch_prompts=1024", "rollout.group_size=8"])  # fmt: skip
    monkeypatch.setattr(router, "settings_of_run", lambda path: run)
    found: list[int] = []
    monkeypatch.setattr(
        router.GlobalRequestLoadBalancer, "__init__", lambda self, servers, max_cache_size: found.append(max_cache_size)
    )
    router.Router({}, {"run_config": "config.toml"})
    assert found == [2 * 1024 * 8]
