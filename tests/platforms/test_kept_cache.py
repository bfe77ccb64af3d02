"""What an update has cached stays cached in a weight sync, where the engine has room beside it."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.platforms import get_platform, kept_cache

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
GIB = 1 << 30
WEIGHTS, CACHE = ("weights",), ("kv_cache",)
MODEL, ACTIVATIONS, ENGINE = 9 * GIB, 30 * GIB, {"weights": GIB, "kv_cache": 6 * GIB}


def test_an_engine_needs_what_still_sleeps_of_it_and_a_sixth_to_spare():
    engine = kept_cache.Waking()
    assert not engine.has_room(60, 60), "what it takes is not known yet"
    engine.woke(WEIGHTS, 5)
    assert not engine.has_room(60, 60)
    engine.woke(CACHE, 20)
    assert engine.has_room(35, 60) and not engine.has_room(34, 60)
    engine.woke(WEIGHTS, 4)  # it took more once
    assert engine.has_room(30, 60) and not engine.has_room(29, 60)
    engine.woke(CACHE, 22)
    assert engine.has_room(37, 60) and not engine.has_room(36, 60)


class Card:
    """torch's module for a GPU of 80 GiB, of which an actor and an engine can have 78."""

    __name__ = "card"

    def __init__(self) -> None:
        self.reserved, self.allocated, self.awake, self.emptied = MODEL, MODEL, 0, 0

    def mem_get_info(self) -> tuple[int, int]:
        return 78 * GIB - self.reserved - self.awake, 80 * GIB

    def memory_reserved(self) -> int:
        return self.reserved

    def empty_cache(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated

    def synchronize(self) -> None: ...

    async def resume_memory_occupation(self, tags: list[str]) -> None:
        self.awake += sum(ENGINE[tag] for tag in tags)
        assert self.mem_get_info()[0] >= 0, "out of memory"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl's worker as far as a weight sync goes, with the patches, on a ``Card``."""
    get_platform("cpu").activate()
    from verl.utils import device, megatron_utils
    from verl.workers import engine_workers
    from verl.workers.rollout.sglang_rollout import sglang_rollout

    card = Card()
    monkeypatch.setattr(kept_cache, "_engine", kept_cache.Waking())
    monkeypatch.setattr(device, "get_torch_device", lambda: card)
    for module in (engine_workers, megatron_utils):
        monkeypatch.setattr(module, "get_torch_device", lambda: card)
    for name in ("set_expandable_segments", "log_gpu_memory_usage"):
        monkeypatch.setattr(engine_workers, name, lambda *a, **k: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    for patch in kept_cache.KEPT_CACHE_PATCHES:
        owner, name = patch.locate()
        monkeypatch.setattr(owner, name, patch.replace(getattr(owner, name)))
    rollout = object.__new__(sglang_rollout.ServerAdapter)
    mesh = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
    settings = {"free_cache_engine": True, "name": "sglang", "checkpoint_engine": SimpleNamespace(backend="naive")}
    rollout.__dict__ |= {
        "_engine": card,
        "_pd_role": None,
        "device_mesh": {"infer_tp": mesh},
        "config": SimpleNamespace(**settings, get=settings.get),
        "sleep_level": 2,
    }

    async def take(weights: Any, **of_the_sync: Any) -> None:
        list(weights)

    rollout.update_weights = take

    def export(**of_the_sync: Any) -> tuple[Any, None]:
        megatron_utils.load_megatron_model_to_gpu([])
        return iter(()), None

    actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=export, is_param_offload_enabled=False))
    config = SimpleNamespace(rollout=rollout.config)
    return SimpleNamespace(
        config=config, rollout=rollout, actor=actor, card=card, layered_summon=False, peft_merge=False
    )


def sync(worker: Any) -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker.card.awake = 0
    asyncio.run(inspect.unwrap(ActorRolloutRefWorker.update_weights)(worker))
    assert worker.card.awake == sum(ENGINE.values())


def test_an_update_keeps_its_memory_through_the_syncs_of_an_engine_that_was_seen_to_wake(worker):
    card = worker.card
    card.reserved += ACTIVATIONS
    sync(worker)
    assert (card.reserved, card.emptied) == (MODEL, 3), "of an engine that nobody knows"
    for _ in range(2):
        card.reserved = MODEL + ACTIVATIONS
        sync(worker)
        assert (card.reserved, card.emptied) == (MODEL + ACTIVATIONS, 3)


def test_it_gives_all_back_where_the_engine_would_have_less_than_a_sixth_to_spare(worker):
    card, most = worker.card, 78 * GIB - sum(ENGINE.values()) - 80 * GIB // 6
    sync(worker)
    for reserved, left, times in ((most, MODEL, 1), (most - 1, most - 1, 0)):
        before, card.reserved = card.emptied, reserved
        sync(worker)
        assert (card.reserved, card.emptied - before) == (left, times)


def test_what_the_actor_itself_takes_meanwhile_is_not_the_engines(worker, monkeypatch):
    async def wakes(card: Card, tags: list[str]) -> None:
        card.awake += 40 * GIB
        card.reserved += 3 * GIB

    monkeypatch.setattr(Card, "resume_memory_occupation", wakes)
    asyncio.run(worker.rollout.resume(list(CACHE)))
    assert kept_cache._engine.has_room(50 * GIB, 60 * GIB) and not kept_cache._engine.has_room(49 * GIB, 60 * GIB)


def test_ranks_of_one_engine_learn_from_the_one_that_wakes_it(worker, monkeypatch):
    """The others' ``resume`` returns at once, so that they have seen nothing."""
    mesh = worker.rollout.device_mesh["infer_tp"]
    mesh.size, mesh.get_local_rank, mesh.get_group = (lambda: 2), (lambda: 1), (lambda: "of the engine")
    told = []

    def all_reduce(took: torch.Tensor, operation: Any, group: Any) -> None:
        told.append((int(took), operation, group))
        took.fill_(40 * GIB)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    async def resume(tags: tuple[str, ...]) -> None:
        await worker.rollout.resume(tags=list(tags))

    asyncio.run(resume(WEIGHTS))
    asyncio.run(resume(CACHE))
    assert told == [(0, torch.distributed.ReduceOp.MAX, "of the engine")] * 2
    assert kept_cache._engine.has_room(96 * GIB, 96 * GIB) and not kept_cache._engine.has_room(95 * GIB, 96 * GIB)
