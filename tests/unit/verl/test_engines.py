"""A dead engine leaves routing and weight sync, and gets requests again once it has the weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RunError
from tests.unit.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
SYNC = ("remove_replicas", "add_replicas", "update_weights", "abort_replicas", "sleep_replicas",
        "resume_generation_replicas")  # fmt: skip


class Replica:
    """An engine at an address; ``starts``: what each start of it again gives."""

    def __init__(self, rank: int, *starts: Exception | None) -> None:
        self.replica_rank, self.servers, self.starts = rank, [f"server {rank}"], list(starts)
        self.server_handle, self.server_address = f"handle {rank}", f"address {rank}"

    async def relaunch(self) -> None:
        if (error := self.starts.pop(0)) is not None:
            raise error
        self.server_handle, self.server_address = f"new handle {self.replica_rank}", f"new address {self.replica_rank}"


def trainer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: list[Replica], *, restarts: int) -> Any:
    """A trainer of these engines; ``calls`` is all that is done to them, in order."""
    from retool_mcore.verl import engines

    class Trainer(engines.EngineManager):
        calls: list[Any]
        on_sample_end = on_step_end = lambda self: None  # verl's trainers have them

    def note(name: str) -> Any:
        return lambda *given: trainer.calls.append((name, *given))

    monkeypatch.setattr(engines.ray, "get", lambda value: value)
    trainer: Any = object.__new__(Trainer)
    trainer._run = load_config(RlConfig, RL, [f"run.root={tmp_path}", f"train.max_engine_restarts={restarts}"])
    balancer = {name: SimpleNamespace(remote=note(name)) for name in ("add_servers", "remove_servers")}
    trainer.llm_server_manager = SimpleNamespace(
        rollout_replicas=replicas,
        server_handles=[each.server_handle for each in replicas],
        server_addresses=[each.server_address for each in replicas],
        global_load_balancer=SimpleNamespace(**balancer),
    )
    trainer.checkpoint_manager = SimpleNamespace(**{name: note(name) for name in SYNC})
    trainer.actor_rollout_wg = SimpleNamespace(forget_engines=note("forget_engines"))
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="sglang")))
    trainer._lost, trainer.engine_version, trainer.calls = [], 7, []
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


def test_a_request_waits_for_an_engine_that_died_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import RayActorError, RayTaskError
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from retool_mcore.verl import engines

    with pytest.raises(RuntimeError) as empty:
        GlobalRequestLoadBalancer({}).acquire_server("t")
    none_now = RayTaskError("acquire", "the way through Ray", empty.value)
    refused = RayTaskError("generate", "the way through Ray", ValueError("the request is too long"))
    dead = "The actor died.\n\tclass_name: {}\n\tactor_id: 1"
    names = ("MeasuredServer", GlobalRequestLoadBalancer.__name__)
    died, router_died = (RayActorError(error_msg=dead.format(name)) for name in names)
    found = [engines.is_retryable(error) for error in (died, none_now, router_died, refused)]
    assert found == [True, True, False, False], "nothing restarts the router"
    client: Any = object.__new__(engines.EngineClient)
    verls = mock.AsyncMock(side_effect=[died, none_now, "tokens", refused])
    monkeypatch.setattr(LLMServerClient, "generate", verls)
    monkeypatch.setattr(engines, "PAUSE_S", (0.0, 0.0))
    assert asyncio.run(client.generate("t", prompt_ids=[1])) == "tokens"
    assert verls.await_args_list == [mock.call("t", prompt_ids=[1])] * 3
    with pytest.raises(RayTaskError):
        asyncio.run(client.generate("t", prompt_ids=[1]))


def test_an_export_of_the_actor_claims_no_fp8_of_its_engine(monkeypatch: pytest.MonkeyPatch):
    """verl's adapter writes the engine's precision into the configuration that both share."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from retool_mcore.verl.workers import SavingActorWorker

    shared = SimpleNamespace(hf_config=SimpleNamespace(quantization_config={"quant_method": "fp8"}, vocab_size=7))
    worker: Any = object.__new__(SavingActorWorker)
    worker.actor, adapter = None, SimpleNamespace(model_config=shared, _engine="the address of a server that died")
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: setattr(self, "rollout", adapter))
    worker.init_model()
    assert vars(shared.hf_config) == {"vocab_size": 7}
    assert adapter.model_config.hf_config.quantization_config == {"quant_method": "fp8"}
    worker.forget_engines()
    assert adapter._engine is None


def test_a_server_counts_what_runs_and_what_waits_over_its_ranks(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import sglang_server

    monkeypatch.setattr(sglang_server, "POLL_INTERVAL_S", 0.0)
    server: Any = object.__new__(sglang_server.MeasuredServer)
    loads = [SimpleNamespace(num_running_reqs=running, num_waiting_reqs=1) for running in (5, 3)]
    server.tokenizer_manager = SimpleNamespace(get_loads=mock.AsyncMock(return_value=loads))
    server._polls, server._in_flight = [], 1

    async def polls() -> list[tuple[int, int]]:
        task = asyncio.ensure_future(server._poll())
        while not server._polls:
            await asyncio.sleep(0)
        task.cancel()
        return await server.pop_load_polls()

    assert asyncio.run(polls())[0] == (8, 2)
