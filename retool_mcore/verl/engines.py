"""Restarts dead engines and sends them the actor's weights, up to train.max_engine_restarts times.

verl's trainer cannot restart engines. We do it with verl's replicas, router and weight sync, in the
trainer's thread, at two points where the actor is idle:

- While the trainer waits for a batch. We start the new engine on the GPUs of the dead one. Then all
  engines pause for a weight sync: requests in flight return their tokens so far, and resume after
  the sync.
- At the end of a step, before its weight sync, for an engine that died while the actor trained.

A new engine has random weights until the sync, so we add it to the router only afterwards. Until
then ``EngineClient`` sends requests to other engines or retries them. An engine that dies during a
sync, or while it goes to sleep, ends the run.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean
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

# How long a request is retried. In mode "partial_rollout", an engine that dies before a step's
# update is restarted only after that update, so this must exceed the time of an update.
MAX_RETRY_S = 3600.0
PAUSE_S = (0.2, 5.0)  # between attempts: initial and maximum
ROUTER_DIED = "class_name: GlobalRequestLoadBalancer"  # in Ray's error message for a dead router
NO_ENGINE = "No available servers"  # in the router's error message


class EngineClient(LLMServerClient):
    """verl's client, with retries while an engine restarts.

    It retries a request if the engine dies or if none is available. No token of a failed request
    has reached the trajectory, so no token is lost or counted twice.
    """

    max_retry_s = MAX_RETRY_S

    async def generate(self, request_id: Any, **request: Any) -> Any:
        """Retry verl's ``generate``; re-raise its error after ``max_retry_s``."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(is_retryable),
            stop=stop_after_delay(self.max_retry_s),
            wait=wait_exponential_jitter(multiplier=PAUSE_S[0], max=PAUSE_S[1]),
            reraise=True,
        )
        return await retrying(super().generate, request_id, **request)


def is_retryable(error: BaseException) -> bool:
    """Whether ``error`` means that the engine died or that the router has no engine.

    A dead router does not count: nothing restarts it, so the request must fail.
    """
    none_now = isinstance(error, RayTaskError) and NO_ENGINE in str(error.cause)
    return none_now or (isinstance(error, RayActorError) and ROUTER_DIED not in str(error))


class ServerWatch:
    """Detects dead servers with a pending call to each, which Ray fails when the server dies."""

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}  # by server

    def death(self, servers: Sequence[Any]) -> RayActorError | None:
        """Ray's error for the first dead server of a replica, or None. Does not block."""
        for server in servers:
            if server not in self._calls:
                self._calls[server] = server.until_it_dies.remote()
            if not ray.wait([self._calls[server]], timeout=0)[0]:
                continue
            try:
                ray.get(self._calls.pop(server))
            except ActorUnavailableError:
                continue  # a network error; the next check calls again
            except RayActorError as error:
                return error
        return None


class EngineManager(PPOTrainer):
    """Mixin for one of verl's trainers; list it before verl's class. ``_run``: the settings."""

    _run: RlConfig
    engine_version = 0  # step of the last weight sync
    _restarts = 0  # since this process started
    _restarts_reported = 0  # restarts already in rows of metrics
    _router: Any = None  # the router that started before the engines; None if a user's router is configured
    _polls: Sequence[tuple[int, int]] = ()  # (running, queued) requests of a server, since the last row of metrics

    def _managers(self) -> tuple[Any, Any]:
        """verl's managers of the sampling engines and of their weight sync."""
        return self.llm_server_manager, self.checkpoint_manager

    def servers(self) -> list[Any]:
        """The servers that take requests, one per engine."""
        return self._managers()[0].server_handles

    @property
    def _runs_our_servers(self) -> bool:
        return ENGINES[self.config.actor_rollout_ref.rollout.name].our_server

    def get_llm_client(self) -> LLMServerClient:
        """A client that returns aborted requests; our loop resumes them and records the version."""
        restarts = self._runs_our_servers and self._run.train.max_engine_restarts > 0
        return self._managers()[0].get_client(client_cls=EngineClient if restarts else LLMServerClient)

    def on_init_end(self) -> None:
        super().on_init_end()
        self.use_early_router()
        self.engine_version = self.global_steps
        self._watch, self._lost = ServerWatch(), list[Any]()
        self.compare_weights()

    def use_early_router(self) -> None:
        """Replace verl's router by ours, with the same engines. Ray then ends verl's router."""
        if self._router is not None:
            manager, _ = self._managers()
            self._router.add_servers.remote(dict(zip(manager.server_addresses, manager.server_handles, strict=True)))
            manager.global_load_balancer = self._router

    def fetch_engine_load(self) -> list[tuple[int, int]]:
        """The servers' polls of their (running, queued) requests since the last call.

        Only our SGLang servers poll; see verl/sglang_server.py.
        """
        polls: list[tuple[int, int]] = []
        for call in [server.pop_load_polls.remote() for server in self.servers() if self._runs_our_servers]:
            with suppress(RayActorError):  # polls of a dead server are lost
                polls += ray.get(call)
        return polls

    def collect_engine_load(self) -> None:
        """Add the polls since the last call to the next row of metrics."""
        self._polls = [*self._polls, *self.fetch_engine_load()]

    def engine_metrics(self) -> dict[str, float]:
        """The metrics ``engine/*`` since the last row; {} for vLLM, which we do not watch."""
        if not self._runs_our_servers:
            return {}
        metrics = {"engine/restarts": float(self._restarts - self._restarts_reported)}
        if self._polls:
            running, queued = zip(*self._polls, strict=True)
            metrics |= {"engine/running/mean": fmean(running), "engine/queued/mean": fmean(queued)}
        self._restarts_reported, self._polls = self._restarts, ()
        return metrics

    def compare_weights(self) -> None:
        """Raise RunError unless all engines have the weights that the actor sent."""
        if not self._runs_our_servers:
            return
        layer, actor = self.actor_rollout_wg.sent_weights()[0]
        for number, call in enumerate([server.weight_sums.remote(layer) for server in self.servers()]):
            try:
                different = different_layers(actor, ray.get(call))
            except RayActorError:
                continue  # it died; the next detach_dead_engines finds it
            if different:
                raise RunError(
                    f"Engine {number} does not have the actor's weights after the weight sync of step "
                    f"{self.global_steps}: {len(different)} parts differ, for example {different[0]!r}. It would "
                    "sample from wrong weights. The same command resumes from the last checkpoint. If the error "
                    "occurs again, report it with the versions that `retool preflight` lists"
                )

    def replace_dead_engines(self) -> None:
        """Restart dead engines, sync their weights and route requests to them.

        Called while the trainer waits for a batch. Blocks until the engines run.
        """
        self.detach_dead_engines()
        if restarted := self.restart_lost_engines():
            self._sync_all_engines()
            self.admit_engines(restarted)

    def detach_dead_engines(self) -> None:
        """Remove dead engines from routing and weight sync.

        Raises RunError if the run would then exceed train.max_engine_restarts.
        """
        if not self._runs_our_servers:
            return
        manager, syncs = self._managers()
        for replica, address in zip(manager.rollout_replicas, manager.server_addresses, strict=True):
            if replica in self._lost or (error := self._watch.death(replica.servers)) is None:
                continue
            self._count(error)
            logger.warning("restarting engine %d, which died: %s", replica.replica_rank, error)
            ray.get(manager.global_load_balancer.remove_servers.remote([address]))
            syncs.remove_replicas([replica])
            self._lost.append(replica)

    def _count(self, error: RayError) -> None:
        """Count a restart. Raises RunError for ``error`` above train.max_engine_restarts."""
        limit = self._run.train.max_engine_restarts
        if self._restarts >= limit:
            raise error_for_user(error, self._run, f"train.max_engine_restarts = {limit} is used up") from error
        self._restarts += 1

    def restart_lost_engines(self) -> list[Any]:
        """Restart all lost engines in parallel. Each failed attempt counts as another restart.

        Returns the replicas. Raises RunError above train.max_engine_restarts.
        """
        lost, self._lost = self._lost, []
        if not lost:
            return []
        started_s = time.monotonic()
        self.actor_rollout_wg.forget_engines()
        remaining = lost
        while remaining:
            errors = asyncio.run(_gather(_relaunch(replica) for replica in remaining))
            failed = [(replica, error) for replica, error in zip(remaining, errors, strict=True) if error is not None]
            for replica, error in failed:
                logger.warning("engine %d did not start: %s", replica.replica_rank, error)
                self._count(error)
            remaining = [replica for replica, _ in failed]
        self._managers()[1].add_replicas(lost)
        ranks = ", ".join(str(replica.replica_rank) for replica in lost)
        logger.warning("engine %s restarted in %.0f s", ranks, time.monotonic() - started_s)
        return lost

    def sleep_engines(self, restarted: Sequence[Any]) -> None:
        """Put the restarted engines to sleep; the weight sync expects sleeping engines."""
        if restarted:
            asyncio.run(_gather(replica.sleep() for replica in restarted))

    def _sync_all_engines(self) -> None:
        """Pause requests in flight and send the weights of ``engine_version`` to all engines."""
        syncs = self._managers()[1]
        syncs.abort_replicas()
        syncs.sleep_replicas()
        syncs.update_weights(self.engine_version)
        syncs.resume_generation_replicas()

    def admit_engines(self, restarted: Sequence[Any]) -> None:
        """Add the restarted engines to the router; call after the weight sync."""
        manager, _ = self._managers()
        for replica in restarted:
            at = manager.rollout_replicas.index(replica)
            manager.server_handles[at], manager.server_addresses[at] = replica.server_handle, replica.server_address
            added = {replica.server_address: replica.server_handle}
            ray.get(manager.global_load_balancer.add_servers.remote(added))


class SeparateEngineManager(EngineManager):
    """For mode "async", whose engines run on separate GPUs and never sleep.

    A restart in the middle of a step sends the actor's current weights, which may be a few updates
    newer than the version that the step's tokens record.
    """

    def _managers(self) -> tuple[Any, Any]:
        return self.standalone_server_manager, self.standalone_checkpoint_manager

    def sleep_engines(self, restarted: Sequence[Any]) -> None:
        """Do nothing: verl's weight sync expects these engines to be awake."""

    def _sync_all_engines(self) -> None:
        self._managers()[1].update_weights(self.engine_version)


async def _relaunch(replica: Any) -> RayError | None:
    """Restart the replica. Returns Ray's error if a server does not start."""
    try:
        await replica.relaunch()
    except RayError as error:
        return error
    return None


async def _gather(calls: Iterable[Any]) -> list[Any]:
    return await asyncio.gather(*calls)
