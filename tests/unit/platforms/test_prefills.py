"""Requests that arrive while others decode are prefilled together."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import PREFILLS_ENV, engine_environment
from retool_mcore.platforms.patches_sglang import MAX_DELAYED_STEPS, PREFILL_PATCH, prefill_together
from retool_mcore.verl.keys.tree import ppo_keys

DECODING, FINISHED = (SimpleNamespace(finished=lambda over=over: over) for over in (False, True))


class Scheduling:
    """The part of SGLang's scheduler that decides between a prefill and a decoding step.

    ``decoding`` requests decode and never end; others wait, and prefills take all that fit.
    ``own``: attributes of SGLang's scheduler that differ.
    """

    def __init__(self, decoding: int, waiting: int = 0, *, slots: int = 512, **own: Any) -> None:
        self.running_batch = SimpleNamespace(reqs=[DECODING] * decoding, is_prefill_only=False)
        self.waiting_queue = [DECODING] * waiting
        self.slots = slots
        self.chunked_req = self.prefill_delayer = None
        self.__dict__ |= own

    def get_num_allocatable_reqs(self, running: int) -> int:
        return self.slots - running

    def prefills(self, steps: int, *, every: int) -> Iterator[tuple[int, int]]:
        """(step, requests) of each prefill. A request comes before every ``every``-th step."""
        for step in range(steps):
            if step % every == 0:
                self.waiting_queue.append(DECODING)
            while batch := choose(self):
                yield step, len(batch)


def sglangs_choice(scheduler: Scheduling) -> list[Any]:
    free = scheduler.get_num_allocatable_reqs(len(scheduler.running_batch.reqs))
    batch, scheduler.waiting_queue = scheduler.waiting_queue[:free], scheduler.waiting_queue[free:]
    scheduler.running_batch.reqs += batch
    return batch


choose = prefill_together(sglangs_choice)


def test_a_prefill_starts_at_a_quarter_of_the_decoding_requests():
    made = list(Scheduling(40).prefills(30, every=1))
    assert made == [(9, 10), (22, 13)]  # of 40, and of 50


def test_the_first_request_waits_a_limited_number_of_steps():
    made = list(Scheduling(400).prefills(3 * (MAX_DELAYED_STEPS + 1), every=5))
    assert made == [(16, 4), (36, 4)]


@pytest.mark.parametrize(
    "scheduler",
    [
        Scheduling(0, 1),
        Scheduling(8, 2),
        Scheduling(400, 3, chunked_req=object()),
        Scheduling(400, 3, prefill_delayer=object()),
        Scheduling(0, 3, running_batch=SimpleNamespace(reqs=[FINISHED] * 400, is_prefill_only=False)),
        Scheduling(0, 3, running_batch=SimpleNamespace(reqs=[DECODING] * 400, is_prefill_only=True)),
    ],
    ids=["nothing decodes", "few decode", "chunked", "own delayer", "all finished", "only prefills"],
)
def test_a_prefill_is_not_delayed(scheduler: Scheduling):
    assert choose(scheduler)


def test_a_full_engine_counts_the_requests_that_fit():
    """300 requests wait, and 3 have ended."""
    full = Scheduling(253, 300, slots=256)
    assert [choose(full) for _ in range(MAX_DELAYED_STEPS)] == [None] * MAX_DELAYED_STEPS
    assert len(choose(full)) == 3
    assert not choose(full), "no request fits, as SGLang finds, too"
    full.running_batch.reqs = full.running_batch.reqs[:190]
    assert len(choose(full)) == 66


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("on", [True, False])
def test_the_setting_leaves_prefills_to_sglang(platform: str, on: bool, monkeypatch: pytest.MonkeyPatch):
    """In the environment that an engine's processes inherit, on other nodes through Ray."""
    words = [f"rollout.batch_prefills={str(on).lower()}", "cluster.nodes=2", "cluster.gpus_per_node=1"]
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", words)
    of_nodes = ppo_keys(config, get_platform("cpu"))["ray_kwargs.ray_init.runtime_env.env_vars"]
    assert (of_nodes.get(PREFILLS_ENV) == "0") != on
    for name, value in engine_environment(config.rollout).items():
        monkeypatch.setenv(name, value)
    assert (PREFILL_PATCH in get_platform(platform).sglang_patches()) == on
