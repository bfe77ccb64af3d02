"""A dead engine leaves routing and weight sync, and gets requests again once it has the weights."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RunError
from tests.unit.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


class Replica:
    """An engine at an address; ``starts``: what each start of it again gives."""

    def __init__(self, rank: int, *starts: Exception | None) -> None:
        self.replica_rank, self.servers, self.starts = rank, [f"server {rank}"], list(starts)
        self.server_handle, self.server_address = f"handle {rank}", f"address {rank}"

    async def relaunch(self) -> None:
        if (error := self.starts.pop(0)) is not None:
            raise error
        self.server_handle, self.server_address = f"new handle {self.replica_rank}", f"new address {self.replica_rank}"


class Remote:
    """Ray's call of a method, which notes what it was called with."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self._name, self._calls = name, calls

    def remote(self, *given: Any) -> None:
        self._calls.append((self._name, *given))


def trainer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: list[Replica], *, restarts: int) -> Any:
    """One of three engines' trainers; ``calls`` is all that is done to them, in order."""
    from retool_mcore.verl import engines

    class Trainer(engines.EngineManager):
        calls: list[Any]
        on_sample_end = on_step_end = lambda self: None  # verl's trainers have them

    monkeypatch.setattr(engines.ray, "get", lambda value: value)
    trainer: Any = object.__new__(Trainer)
    settings = [f"run.root={tmp_path}", f"train.max_engine_restarts={restarts}"]
    trainer._run = load_config(RlConfig, RL, settings)
    calls: list[Any] = []
    balancer = SimpleNamespace(**{name: Remote(name, calls) for name in ("add_servers", "remove_servers")})
    trainer.llm_server_manager = SimpleNamespace(
        rollout_replicas=replicas,
        server_handles=[each.server_handle for each in replicas],
        server_addresses=[each.server_address for each in replicas],
        global_load_balancer=balancer,
    )
    note = {name: Remote(name, calls).remote for name in ("remove_replicas", "add_replicas", "update_weights")}
    plain = ("abort_replicas", "sleep_replicas", "resume_generation_replicas")
    trainer.checkpoint_manager = SimpleNamespace(**note, **{name: Remote(name, calls).remote for name in plain})
    trainer.actor_rollout_wg = SimpleNamespace(forget_engines=Remote("forget_engines", calls).remote)
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="sglang")))
    trainer._lost, trainer.engine_version, trainer.calls = [], 7, calls
    return trainer


def test_a_dead_engine_is_replaced_and_gets_requests_only_when_it_has_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from ray.exceptions import RayActorError

    replicas = [Replica(0), Replica(1, None), Replica(2)]
    trainer = trainer_of(tmp_path, monkeypatch, replicas, restarts=3)
    dead = {"server 1"}
    trainer._watch = SimpleNamespace(death=lambda servers: RayActorError() if dead & set(servers) else None)
    trainer.detach_dead_engines()  # finds it, and the next call finds it again
    trainer.replace_dead_engines()
    assert trainer.calls == [
        ("remove_servers", ["address 1"]),
        ("remove_replicas", [replicas[1]]),
        ("forget_engines",),
        ("add_replicas", [replicas[1]]),
        ("abort_replicas",),
        ("sleep_replicas",),
        ("update_weights", 7),
        ("resume_generation_replicas",),
        ("add_servers", {"new address 1": "new handle 1"}),
    ]
    manager = trainer.llm_server_manager
    assert manager.server_handles == ["handle 0", "new handle 1", "handle 2"]
    assert manager.server_addresses == ["address 0", "new address 1", "address 2"], "or its next death removes nothing"
    assert trainer._lost == [] and trainer._restarts == 1
    manager.get_client = lambda client_cls: client_cls.__name__
    assert trainer.get_llm_client() == "EngineClient"
    trainer.config.actor_rollout_ref.rollout.name = "vllm"  # whose servers cannot be watched
    trainer.compare_weights()
    assert trainer.get_llm_client() == "LLMServerClient" and trainer.fetch_engine_load() == []


def test_a_start_that_fails_counts_and_is_tried_again_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import RayActorError

    replicas = [Replica(0, None), Replica(1, RayActorError(), None)]
    trainer = trainer_of(tmp_path, monkeypatch, replicas, restarts=1)
    trainer._lost = list(replicas)
    assert trainer.restart_lost_engines() == replicas
    assert trainer._restarts == 1 and replicas[0].starts == replicas[1].starts == [], "each of them as often as needed"
    trainer._lost = [Replica(2, RayActorError(), None)]
    with pytest.raises(RunError, match=r"train\.max_engine_restarts = 1 is used up"):
        trainer.restart_lost_engines()


def asked(monkeypatch: pytest.MonkeyPatch, *answers: Any, max_retry_s: float = 60.0) -> Any:
    """What our client makes of what verl's gives at each attempt; pauses take no time."""
    from verl.workers.rollout.llm_server import LLMServerClient

    from retool_mcore.verl import engines

    left = list(answers)

    async def generate(self: Any, request_id: str, **request: Any) -> Any:
        assert (request_id, request) == ("t", {"prompt_ids": [1]})
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    monkeypatch.setattr(engines, "PAUSE_S", (0.0, 0.0))
    client: Any = object.__new__(engines.EngineClient)
    client.max_retry_s = max_retry_s
    return asyncio.run(client.generate("t", prompt_ids=[1]))


def test_a_request_waits_for_an_engine_that_died_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import RayActorError, RayTaskError
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from retool_mcore.verl.engines import MAX_RETRY_S, EngineClient, is_retryable

    with pytest.raises(RuntimeError) as empty:
        GlobalRequestLoadBalancer({}).acquire_server("t")
    none_now = RayTaskError("acquire", "the way through Ray", empty.value)
    refused = RayTaskError("generate", "the way through Ray", ValueError("the request is too long"))
    assert asked(monkeypatch, RayActorError(), none_now, "tokens") == "tokens"
    with pytest.raises(RayTaskError):
        asked(monkeypatch, refused, "never asked for")
    with pytest.raises(RayActorError):
        asked(monkeypatch, RayActorError(), "too late", max_retry_s=0.0)
    dead = "The actor died.\n\tclass_name: {}\n\tactor_id: 1"
    died = [
        RayActorError(error_msg=dead.format(name)) for name in ("MeasuredServer", GlobalRequestLoadBalancer.__name__)
    ]
    assert [is_retryable(each) for each in died] == [True, False], "nothing restarts the router"
    assert EngineClient.max_retry_s == MAX_RETRY_S >= 3600, "an engine may come back after the update that it died in"


def test_the_router_that_started_early_gets_the_engines_and_replaces_verls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_of(tmp_path, monkeypatch, [Replica(0), Replica(1)], restarts=1)
    verls, early = trainer.llm_server_manager.global_load_balancer, SimpleNamespace()
    trainer.use_early_router()
    assert trainer.llm_server_manager.global_load_balancer is verls, "a user's router stays"
    early.add_servers = Remote("add_servers", trainer.calls)
    trainer._router = early
    trainer.use_early_router()
    assert trainer.llm_server_manager.global_load_balancer is early
    assert trainer.calls == [("add_servers", {"address 0": "handle 0", "address 1": "handle 1"})]


def test_a_server_starts_early_for_each_engine_and_for_no_gpu_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[int] = []
    servers = SimpleNamespace(create_servers=made.append)
    monkeypatch.setitem(sys.modules, "retool_mcore.verl.sglang_server", servers)
    trainer = trainer_of(tmp_path, monkeypatch, [], restarts=1)
    trainer._run = load_config(RlConfig, RL, ["train.mode=async", "cluster.gpus_per_node=6", "rollout.gpus=4"])
    sizes = {f"{part}_parallel_size": size for part, size in (("tensor_model", 2), ("data", 1), ("pipeline_model", 1))}
    trainer.config.actor_rollout_ref.rollout = SimpleNamespace(name="sglang", **sizes)
    trainer.start_engines()
    assert made == [2]


def test_a_server_is_dead_when_its_pending_call_fails_and_not_when_the_network_does(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import ActorUnavailableError, RayActorError

    from retool_mcore.verl import engines

    def get(call: Exception) -> None:
        raise call

    monkeypatch.setattr(engines.ray, "wait", lambda calls, timeout: [[call for call in calls if call != "pending"]])
    monkeypatch.setattr(engines.ray, "get", get)
    alive, other, death = mock.Mock(), mock.Mock(), RayActorError()
    alive.until_it_dies.remote = iter(["pending"]).__next__  # it is called once
    other.until_it_dies.remote = iter([ActorUnavailableError("a cable", None), death]).__next__
    watch = engines.ServerWatch()
    assert [watch.death([alive, other]) for _ in range(2)] == [None, death]
