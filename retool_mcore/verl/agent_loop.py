"""Our agent loop: verl's agent-loop worker creates one ``ReToolAgentLoop`` per trajectory.

The file at rollout.agent.agent_loop_config_path contains the path of the run's settings. All
trajectories of a worker process share one protocol and one sandbox; the first trajectory opens
both.

verl handles the output of ``ReToolAgentLoop.run`` as follows:

- It stores a trajectory in TransferQueue together with its ``extra_fields``. The reward function
  gets these in ``extra_info``, and ``verl.replay`` reads them for the ``behavior/`` metrics and the
  trajectory file.
- It stores nothing for ``[]``, a dropped trajectory. No advantage includes it, and verl pads the
  batch with rows of loss mask 0. ``verl.replay`` counts it, and stops the run if more than
  rollout.max_dropped_fraction are dropped.

Our worker processes start while the training workers build the model. verl would create them last.
Each would then import verl and SGLang and open the sandbox before its first prompt, which took 22 s
of a first validation of 40 s on an H100 node. Our workers get verl's settings later, when verl
creates its agent-loop manager.

Our router starts at the same time. verl would create it last, with the engines' handles. Ray
imports the class of a handle, and SGLang with it, in the process that gets the handle, so the first
requests waited 13 s for the router on an H200 node.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from retool_mcore.config import Algorithm, RlConfig
from retool_mcore.data.chat import set_date
from retool_mcore.data.prompt_format import date_of
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.platforms.base import get_platform
from retool_mcore.platforms.rollout_engines import ENGINES
from retool_mcore.rollout.engine import (
    TRAINING,
    Engine,
    EngineTurn,
    EngineUnavailable,
    Routes,
    Sampling,
    TurnRequest,
    trajectory_seed,
)
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory, run_trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import ToolProtocol, checked_prompt, protocol_of
from retool_mcore.rollout.records import is_candidate, is_held_out_candidate, record
from retool_mcore.rollout.tools import ToolContext
from retool_mcore.run import heartbeat
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox
from retool_mcore.verl.keys.rollout import settings_of_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl.workers.rollout.llm_server import LLMServerClient

logger = logging.getLogger(__name__)

# verl exports its worker as a Ray actor class; a subclass needs the plain class behind it.
_remote: Any = AgentLoopWorkerTQ
_Worker: Any = _remote.__ray_actor_class__

drop_causes: Counter[str] = Counter()  # errors that dropped trajectories in this process: "TYPE: text"


class ReToolAgentLoop(AgentLoopBase):
    """Samples one trajectory of a run.

    ``run_config``: path of the run's settings, written by ``verl.keys.rollout.write_settings``.
    """

    def __init__(self, *args: Any, run_config: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = _shared(run_config, self.tokenizer)

    def engine(self) -> Engine:
        """The engine that samples a trajectory's turns."""
        return VerlEngine(self.server_manager, request_seeds=ENGINES[self.rollout_config.name].request_seeds)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Sample one trajectory for the dataset row ``kwargs``; ``[]`` if an outage dropped it."""
        shared = self.shared
        where = " or ".join(path for _, path in shared.config.data_files)
        messages = list(kwargs["raw_prompt"])
        trajectory = await run_trajectory(
            checked_prompt(shared.protocol, messages, shared.config.data.max_prompt_tokens, where),
            engine=self.engine(),
            sandbox=shared.sandbox,
            protocol=shared.protocol,
            limits=shared.limits,
            sampling=Sampling(
                temperature=sampling_params["temperature"],
                top_p=sampling_params["top_p"],
                top_k=sampling_params["top_k"],
                seed=_seed(shared.config.run.seed, kwargs),
            ),
            trajectory_id=uuid4().hex,
            tool_context=_tool_context(kwargs),
        )
        heartbeat.send()
        if trajectory.dropped:
            drop_causes[trajectory.drop_error or "an outage"] += 1
            logger.warning("trajectory of prompt %s dropped: %s", kwargs.get("uid"), trajectory.drop_error)
            return []
        recorded = self._record(trajectory, kwargs) if _is_candidate(kwargs, shared.config) else None
        masked = not kwargs["held_out"] and is_masked(shared.config.algorithm, trajectory)
        output = _output(trajectory, recorded, masked=masked, row=int(kwargs["row"]))
        if shared.config.algorithm.router_replay == "R3":
            output.routed_experts = routes_of(trajectory)
        return output

    def _record(self, trajectory: Trajectory, row: Mapping[str, Any]) -> dict[str, Any]:
        """The trajectory's record for the trajectory file, without tokens, from dataset ``row``."""
        return {
            "prompt": self.tokenizer.decode(trajectory.ledger.prompt_ids),
            "truth": (row.get("reward_model") or {}).get("ground_truth"),
            **record(trajectory),
            "versions": trajectory.ledger.versions,  # verl has no column for per-token versions
        }


@dataclass(frozen=True)
class _Shared:
    config: RlConfig
    protocol: ToolProtocol
    sandbox: Sandbox | None
    limits: Limits


@lru_cache(maxsize=1)
def _shared(run_config: str, tokenizer: Any) -> _Shared:
    config = settings_of_run(run_config)
    heartbeat.start(Path(run_config).parent)
    set_date(tokenizer, date_of(Path(run_config).parent))
    protocol = protocol_of(config.rollout, tokenizer)
    return _Shared(config, protocol, sandbox_of(run_config), Limits.of(config.rollout, config.sandbox))


@lru_cache(maxsize=1)
def sandbox_of(run_config: str) -> Sandbox | None:
    """The sandbox that this process's trajectories share; None if ``rollout.tool`` is off."""
    config = settings_of_run(run_config)
    if not config.rollout.tool:
        return None
    # The settings are per node. Agent workers are assigned to nodes round-robin, so round up.
    per_node = -(-config.rollout.agent_workers // config.cluster.nodes)
    workers = max(1, config.sandbox.workers // per_node)
    return open_sandbox(
        config.sandbox.where,
        min_level=config.sandbox.min_level,
        workers=workers,
        sessions=max(workers, config.sandbox.sessions // per_node) if config.sandbox.sessions else 0,
        python=config.sandbox.python,
        preload=config.sandbox.preload,
    )


class VerlEngine:
    """Adapts verl's client of the rollout servers to our ``Engine`` interface.

    ``options``: further sampling parameters. ``request_seeds``: send a seed with each request, and
    the parameters that detect the end of a tool call, under SGLang's names.
    """

    def __init__(
        self, client: LLMServerClient, options: Mapping[str, Any] | None = None, *, request_seeds: bool = False
    ) -> None:
        self.client = client
        self.options, self.request_seeds = options or {}, request_seeds

    async def generate(self, request: TurnRequest) -> EngineTurn:
        params = {
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            **self.options,
        }
        if self.request_seeds:
            params["sampling_seed"] = request.sampling.seed
            if custom := request.custom_params:
                params["custom_params"] = custom
        try:
            output = await self.client.generate(
                request_id=request.trajectory_id, prompt_ids=list(request.token_ids), sampling_params=params
            )
        except RayError as error:
            raise EngineUnavailable(
                f"the rollout server failed: {type(error).__name__}: {str(error)[-500:]}"
            ) from error
        heartbeat.send()
        return EngineTurn(
            token_ids=output.token_ids,
            logprobs=output.log_probs or [],  # verl returns None for an abort before the first token
            stop=_stop(output.stop_reason, output.token_ids, request.stop_token_ids),
            version=int(output.extra_fields.get("max_global_steps") or 0),
            cached_tokens=output.extra_fields.get("num_cached_tokens"),
            routes=None if output.routed_experts is None else output.routed_experts.astype(np.int16),
        )


def _is_candidate(row: dict[str, Any], config: RlConfig) -> bool:
    """Whether to record the trajectory of this ``verl.dataset`` row in the trajectory file.

    verl assigns new uids in each validation, so the row number identifies a held-out problem.
    """
    if row["held_out"]:
        return is_held_out_candidate(int(row["row"]), config)
    return is_candidate(row.get("uid", ""), config)


def _seed(run_seed: int, row: Mapping[str, Any]) -> int:
    """The sampling seed of a trajectory of a ``verl.dataset`` row.

    For a held-out row, the seed that `retool eval` uses.
    """
    problem, sample = int(row["row"]), int(row["session_id"])
    if row["held_out"]:
        return trajectory_seed(run_seed, problem, sample)
    return trajectory_seed(run_seed, TRAINING, int(row["global_steps"]), problem, sample)


def _tool_context(row: Mapping[str, Any]) -> ToolContext:
    """The fields of a ``verl.dataset`` row that tools receive."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    return ToolContext(
        truth="" if truth is None else str(truth),
        data_source=row.get("data_source") or "",
        extra_info=row.get("extra_info") or {},
    )


def _stop(
    reason: str | None, token_ids: Sequence[int], stop_token_ids: Sequence[int]
) -> Literal["stop", "length", "abort"]:
    """Translate the engine's stop reason, which verl passes through unchanged.

    SGLang reports "stop", vLLM "completed"; both report "length" and "abort" or "aborted".
    """
    if reason in ("abort", "aborted"):
        return "abort"
    if reason == "length":
        return "length"
    return "stop" if token_ids and token_ids[-1] in set(stop_token_ids) else "length"


def routes_of(trajectory: Trajectory) -> Routes:
    """The experts chosen in a trajectory of T tokens, for router replay.

    Returns:
        int16 [T - 1, L, K]: for each token but the last, the K experts of each of L layers.
    """
    ledger = trajectory.ledger
    routes = ledger.routes
    returned, needed = 0 if routes is None else len(routes), len(ledger.context) - 1
    assert returned == needed, f"the engine returned the experts of {returned} tokens; replay needs {needed}"
    assert routes is not None
    return routes


def is_masked(algorithm: Algorithm, trajectory: Trajectory) -> bool:
    """Whether ``algorithm.mask`` excludes the whole response from the loss."""
    truncated = trajectory.stop_reason in (StopReason.LENGTH, StopReason.NO_ROOM)
    masked = {"truncated": truncated, "void_turns": trajectory.has_void_turn}
    return any(masked[kind] for kind in algorithm.mask)


def _output(trajectory: Trajectory, recorded: dict[str, Any] | None, *, masked: bool, row: int) -> AgentLoopOutput:
    """The trajectory of dataset row ``row`` in verl's format; ``masked`` zeros its loss mask."""
    ledger = trajectory.ledger
    versions = [version for version, loss in zip(ledger.versions, ledger.loss_mask, strict=True) if loss]
    return AgentLoopOutput(
        prompt_ids=ledger.prompt_ids,
        response_ids=ledger.response_ids,
        response_mask=[0] * len(ledger.loss_mask) if masked else ledger.loss_mask,
        response_logprobs=ledger.logprobs,
        num_turns=ledger.turns + 1,  # verl also counts the prompt
        metrics=AgentLoopMetrics(generate_sequences=trajectory.engine_s, tool_calls=trajectory.tool_s),
        extra_fields={
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            # The reward uses the answer that the model boxed in its last turn, never one that the
            # interpreter printed.
            "answer": trajectory.answer,
            "behavior": Behavior.of(trajectory).to_json(),
            "record": recorded,
            "row": row,  # for the curriculum
        },
    )


# ------------------------------------------------- the worker processes


class DropCauseHandler(logging.Handler):
    """Counts the exceptions that dropped trajectories and that verl only logs."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            first = error.cause if isinstance(error, RayTaskError) else error  # RayTaskError: from a reward worker
            drop_causes[f"{type(first).__name__}: {first}"] += 1


class LoopWorker(_Worker):
    """verl's agent-loop worker, created before verl's settings exist."""

    def __init__(self) -> None:
        """Do nothing; ``construct`` calls verl's constructor later."""

    async def warm_up(self, run_config: str) -> None:
        """Open the sandbox, and import what unpickling an engine's handle needs."""
        import_server(self, run_config)
        if sandbox := sandbox_of(run_config):
            try:
                await sandbox.open()
            except SandboxUnavailable as error:  # each tool call retries, and counts as an outage if that fails
                logger.warning("the sandbox could not be opened yet: %s", error)

    def construct(self, *settings: Any) -> None:
        super().__init__(*settings)
        logging.getLogger(AgentLoopManagerTQ.__module__).addHandler(DropCauseHandler(logging.ERROR))

    async def pop_drop_causes(self) -> dict[str, int]:
        """How many trajectories each exception or outage dropped since the last call."""
        popped = dict(drop_causes)
        drop_causes.clear()
        return popped


def import_server(_: Any, run_config: str) -> None:
    """Import sglang_server, which unpickling an engine's handle needs, in an actor's process."""
    if get_platform(settings_of_run(run_config).run.platform).rollout.engine.our_server:
        importlib.import_module("retool_mcore.verl.sglang_server")


_created: list[tuple[Any, Any]] = []  # each worker, and the Ray reference of its warm-up call


def create_workers(config: RlConfig) -> None:
    """Create the agent-loop workers, spread over the run's nodes round-robin as verl does."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    for number in range(config.rollout.agent_workers):
        node = NodeAffinitySchedulingStrategy(node_id=nodes[number % len(nodes)], soft=True)
        worker: Any = ray.remote(LoopWorker).options(scheduling_strategy=node).remote()
        _created.append((worker, worker.warm_up.remote(str(config.run.config_file))))


def create_router(config: RlConfig, *, full_determinism: bool) -> Any:
    """Create verl's router without engines. Give it the engines with ``add_servers``."""
    router: Any = ray.remote(GlobalRequestLoadBalancer).remote({}, full_determinism=full_determinism)
    router.__ray_call__.remote(import_server, str(config.run.config_file))
    return router


class LoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, with the workers of ``create_workers``."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> LoopManager:
        manager = cls(*args, **kwargs)
        ray.get([warm_up for _, warm_up in _created])
        manager.agent_loop_workers = [worker for worker, _ in _created]
        settings = (manager.config, manager.llm_client, manager.teacher_client, manager.reward_loop_worker_handles)
        ray.get([worker.construct.remote(*settings) for worker in manager.agent_loop_workers])
        _created.clear()
        return manager

    def pop_drop_causes(self) -> Counter[str]:
        """The sum of ``pop_drop_causes`` over all workers."""
        popped = ray.get([worker.pop_drop_causes.remote() for worker in self.agent_loop_workers])
        return sum(map(Counter, popped), Counter())
