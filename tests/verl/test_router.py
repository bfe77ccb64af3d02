"""The router that keeps a trajectory on its engine; the Ray of these tests is in one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

RL = Path(__file__).parents[2] / "configs" / "rl_tiny_cpu.toml"


class Here:
    """Ray's handle of an actor, which is in this process."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.held, name))


def test_the_first_router_that_gets_engines_is_the_one_created_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.workers.rollout.router import get_router_handle

    from retool_mcore.verl import router
    from retool_mcore.verl.keys.rollout import router_file, write_settings

    imported: list[RlConfig] = []
    ray = SimpleNamespace(remote=lambda cls: SimpleNamespace(remote=lambda: Here(cls())), get=lambda answer: answer)
    monkeypatch.setattr(router, "ray", ray)
    monkeypatch.setattr(router, "import_engine_class", imported.append)
    monkeypatch.setattr(router.ROUTER, "remote", lambda *given: Here(router.Router(*given)), raising=False)
    config = load_config(RlConfig, RL, [f"run.root={tmp_path}"])
    config.run.dir.mkdir()
    write_settings(config)
    file = str(router_file(config))
    router.create_router(config)
    assert len(imported) == 1, "else an engine's handle imports its class while the first prompt waits"
    made = [get_router_handle(servers, file).held for servers in ({}, {"here": 1}, {"there": 2})]
    assert [type(each).__name__ for each in made] == ["Router", "EarlyRouter", "Router"]
    assert [each.get_all_servers() for each in made] == [[], ["here"], ["there"]]
    assert made[1].acquire_server("a trajectory") == ("here", 1)


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
