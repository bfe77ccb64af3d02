"""Engines that die are restarted and get the actor's weights, up to train.max_engine_restarts.

verl's trainer has no such part; its replicas, router and weight sync do the work. All of it happens
in the trainer's own thread, at two moments when the actor does nothing else:

- While a batch is awaited. The new engine is started on the devices of the old one, and then every
  engine pauses for one weight sync: requests in flight come back with the tokens that they have,
  and go on after it.
- At the end of a step, before its weight sync, for an engine that died while the actor learnt.

A new engine has random weights until the sync; only then does the router hear of it. Until then
``EngineClient`` sends requests elsewhere, or holds them. An engine that dies during a sync, or
while it goes to sleep, ends the run.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential_jitter
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.rollout.llm_server import LLMServerClient

from retool_mcore.config import RlConfig
from retool_mcore.errors import RunError
from retool_mcore.platforms.rollout_engines import ENGINES
from retool_mcore.verl.failure import error_for_user
from retool_mcore.verl.weight_check import different_layers

logger = logging.getLogger(__name__)

# The longest wait of a request. In mode "partial_rollout" it may begin before a step's update,
# after which the engine is restarted.
ENGINE_AWAY_S = 3600.0
PAUSE_S = (0.2, 5.0)  # between two attempts: at first, at most
ROUTER_DIED = "class_name: GlobalRequestLoadBalancer"  # in Ray's error for an actor
NONE_NOW = "No available servers"  # in the router's own error


class EngineClient(LLMServerClient):
    """verl's client, which waits for an engine that is being restarted.

    A request that an engine took with it, or that finds none, is sent again. Nothing of it has
    reached the trajectory, so no token is lost or counted twice.
    """

    away_s = ENGINE_AWAY_S

    async def generate(self, request_id: Any, **request: Any) -> Any:
        """verl's, again until an engine answers. Raises what verl's raises after ``away_s``."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(is_away),
            stop=stop_after_delay(self.away_s),
            wait=wait_exponential_jitter(multiplier=PAUSE_S[0], max=PAUSE_S[1]),
            reraise=True,
        )
        return await retrying(super().generate, request_id, **request)


def is_away(error: BaseException) -> bool:
    """Whether ``error`` says that the engine died, or, from the router, that there is none now.

    Nothing restarts the router: a request that finds it dead fails.
    """
    none_now = isinstance(error, RayTaskError) and NONE_NOW in str(error.cause)
    return none_now or (isinstance(error, RayActorError) and ROUTER_DIED not in str(error))


class Watch:
    """Tells which servers have died, by a call to each that ends with it."""

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}  # by server

    def death(self, servers: Sequence[Any]) -> RayActorError | None:
        """Ray's error for the first of a replica's ``servers`` that has died; does not wait."""
        for server in servers:
            if server not in self._calls:
                self._calls[server] = server.until_it_dies.remote()
            if not ray.wait([self._calls[server]], timeout=0)[0]:
                continue
            try:
                ray.get(self._calls.pop(server))
            except ActorUnavailableError:
                continue  # the network failed; the next look asks again
            except RayActorError as error:
                return error
        return None


class EngineRestarts(PPOTrainer):
    """Mixed in before one of verl's trainers; ``_run`` has the run's settings."""

    _run: RlConfig
    engine_version = 0  # of the weights that the engines have: the step of the last sync
    actor_is_ahead = False  # whether the actor has been updated since
    _restarts = 0  # in this start of the run
    _restarts_reported = 0  # of them in rows of metrics

    def _managers(self) -> tuple[Any, Any]:
        """verl's managers of the engines that sample, and of their weight sync."""
        return self.llm_server_manager, self.checkpoint_manager

    def servers(self) -> list[Any]:
        """The servers that take requests, one of each engine."""
        return self._managers()[0].server_handles

    @property
    def _watches(self) -> bool:
        return ENGINES[self.config.actor_rollout_ref.rollout.name].own_server

    def get_llm_client(self) -> LLMServerClient:
        """A client that hands on aborts: our loop continues after one, and so knows versions."""
        restarts = self._watches and self._run.train.max_engine_restarts > 0
        return self._managers()[0].get_client(client_cls=EngineClient if restarts else LLMServerClient)

    def on_init_end(self) -> None:
        super().on_init_end()
        self.engine_version = self.global_steps
        self._watch, self._lost = Watch(), list[Any]()
        self.compare_weights()

    def engine_metrics(self) -> dict[str, float]:
        """``engine/restarts``: since the row of metrics before; nothing where nobody watches."""
        if not self._watches:
            return {}
        since, self._restarts_reported = self._restarts - self._restarts_reported, self._restarts
        return {"engine/restarts": float(since)}

    def compare_weights(self) -> None:
        """Raise RunError unless all engines hold the weights that the actor has sent."""
        if not self._watches:
            return
        layer, actor = self.actor_rollout_wg.sent_weights()[0]
        for number, call in enumerate([server.weight_sums.remote(layer) for server in self.servers()]):
            try:
                different = different_layers(actor, ray.get(call))
            except RayActorError:
                continue  # it died, which the next look at the engines notices
            if different:
                raise RunError(
                    f"Engine {number} does not hold the actor's weights after the weight sync of step "
                    f"{self.global_steps}: {len(different)} parts differ, the first of them {different[0]!r}. What it "
                    "samples would not be from this model. The same command goes on after the last checkpoint; if it "
                    "happens again, report it with the versions that `retool preflight` lists"
                )

    def replace_dead_engines(self) -> None:
        """Called while a batch is awaited: what has died is replaced before it returns."""
        self.detach_dead_engines()
        if restarted := self.restart_lost_engines():
            self._sync_all_engines()
            self.admit_engines(restarted)

    def detach_dead_engines(self) -> None:
        """Take dead engines out of routing and weight sync. Raises RunError above the limit."""
        if not self._watches:
            return
        manager, syncs = self._managers()
        for replica, address in zip(manager.rollout_replicas, manager.server_addresses, strict=True):
            if replica in self._lost or (error := self._watch.death(replica.servers)) is None:
                continue
            self._count(error)
            logger.warning("engine %d died and is restarted: %s", replica.replica_rank, error)
            ray.get(manager.global_load_balancer.remove_servers.remote([address]))
            syncs.remove_replicas([replica])
            self._lost.append(replica)

    def _count(self, error: RayError) -> None:
        """One restart more. Raises RunError for ``error`` if train.max_engine_restarts are done."""
        limit = self._run.train.max_engine_restarts
        if self._restarts >= limit:
            raise error_for_user(error, self._run, f"train.max_engine_restarts = {limit} allows no restart") from error
        self._restarts += 1

    def restart_lost_engines(self) -> list[Any]:
        """Start the lost engines again, all at once; one that does not start counts once more."""
        back, self._lost = self._lost, []
        if not back:
            return []
        started_s = time.monotonic()
        self.actor_rollout_wg.forget_engines()
        wanted = back
        while wanted:
            results = asyncio.run(_relaunch(wanted))
            failed = [(each, result) for each, result in zip(wanted, results, strict=True) if result is not None]
            for replica, error in failed:
                logger.warning("engine %d did not start: %s", replica.replica_rank, error)
                self._count(error)
            wanted = [replica for replica, _ in failed]
        self._managers()[1].add_replicas(back)
        ranks = ", ".join(str(replica.replica_rank) for replica in back)
        logger.warning("engine %s restarted in %.0f s", ranks, time.monotonic() - started_s)
        return back

    def sleep_engines(self, restarted: Sequence[Any]) -> None:
        """The new engines sleep like the others, which the step's weight sync wakes up."""
        if restarted:
            asyncio.run(_each(replica.sleep() for replica in restarted))

    def _sync_all_engines(self) -> None:
        """Give all engines the weights that they are to have, with requests in flight paused."""
        syncs = self._managers()[1]
        syncs.abort_replicas()
        syncs.sleep_replicas()
        syncs.update_weights(self.engine_version)
        syncs.resume_generation_replicas()

    def admit_engines(self, restarted: Sequence[Any]) -> None:
        """Requests may go to the new engines, which have the actor's weights by now."""
        manager, _ = self._managers()
        for replica in restarted:
            at = manager.rollout_replicas.index(replica)
            manager.server_handles[at], manager.server_addresses[at] = replica.server_handle, replica.server_address
            added = {replica.server_address: replica.server_handle}
            ray.get(manager.global_load_balancer.add_servers.remote(added))


class DetachedEngineRestarts(EngineRestarts):
    """For mode "async", whose engines have devices of their own and never sleep.

    Between the updates of a step they keep the weights of its start, and a new engine gets those
    too: from the copy on the host that each update is compared with.
    """

    def _managers(self) -> tuple[Any, Any]:
        return self.standalone_server_manager, self.standalone_checkpoint_manager

    def sleep_engines(self, restarted: Sequence[Any]) -> None:
        """Does nothing: verl's sync to these engines begins with them awake."""

    def _sync_all_engines(self) -> None:
        syncs, actor = self._managers()[1], self.actor_rollout_wg
        ahead = self.actor_is_ahead  # false in a step of one update, for which no copy is made
        if ahead:
            actor.save_model_to_cpu(1)
            actor.restore_model_from_cpu(0)
        syncs.update_weights(self.engine_version)
        if ahead:
            actor.restore_model_from_cpu(1)
            actor.clear_cpu_model(1)


async def _relaunch(replicas: Sequence[Any]) -> list[RayError | None]:
    """Start each again. Returns Ray's error of each that failed; raises all others."""
    results = await asyncio.gather(*(replica.relaunch() for replica in replicas), return_exceptions=True)
    failed: list[RayError | None] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RayError):
            raise result
        failed.append(result if isinstance(result, RayError) else None)
    return failed


async def _each(calls: Any) -> None:
    await asyncio.gather(*calls)
