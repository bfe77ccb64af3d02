"""verl's SGLang replicas and servers, extended by a seed per replica, load metrics and restart.

On one node, the servers' processes start and import SGLang while the training workers build the
model (15 s on an H200 node). verl would start them afterwards.

The driver imports this module in ``runner.import_engine``, where verl first installs stubs of
vLLM, which its SGLang modules import.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayActorError
from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers.io_struct import CheckWeightsReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.utils.auth import add_api_key_middleware
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from retool_mcore.platforms.network import engine_key
from retool_mcore.platforms.patches_verl import API_KEY_PATCH
from retool_mcore.platforms.rollout_engines import SGLANG
from retool_mcore.platforms.weight_sums import ACTION, Sums

POLL_INTERVAL_S = 0.5  # polls read SGLang's existing counters; in 0.5.14 they lag up to 15 decoding steps
# Concurrent calls per server. High enough that no request queues in Ray, where no metric counts it,
# and that no control call queues behind requests. The paper has 16,384 trajectories in flight.
MAX_CALLS = 65_536
DEAD_POLL_S = 0.5


class MeasuredServer(SGLangHttpServer):
    """One server of a replica; the server on the replica's first node takes the requests."""

    def __init__(self, **arguments: Any) -> None:
        """Call verl's constructor. Without arguments, leave that to ``construct``."""
        self._constructed = asyncio.Event()
        self._error: Exception | None = None
        if arguments:
            super().__init__(**arguments)
            self._constructed.set()

    def construct(self, **arguments: Any) -> None:
        """Call verl's constructor. ``launch_server`` raises its error."""
        try:
            super().__init__(**arguments)
        except Exception as error:  # noqa: BLE001  launch_server raises it
            self._error = error
        self._constructed.set()

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await self._constructed.wait()  # Ray may call an asynchronous actor's methods out of order
        if self._error is not None:
            raise self._error
        if key := engine_key():  # as SGLang's launch_server does for --api-key
            add_api_key_middleware(app, api_key=key, admin_api_key=None)
        load_plugins()  # before verl creates ServerArgs; SGLang would load them afterwards
        await super().launch_server(*args, **kwargs)
        if self.node_rank:
            return
        self._in_flight = 0
        self._polls: list[tuple[int, int]] = []
        self._cached_tokens: dict[str, int] = {}
        self.tokenizer_manager.generate_request = self._record_meta_info(self.tokenizer_manager.generate_request)
        self._poller = asyncio.create_task(self._poll())  # asyncio drops a task without a reference

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **kwargs: Any) -> Any:
        """Generate as verl does, and add ``num_cached_tokens`` to the output's extra fields.

        verl's vLLM server has the same field.
        """
        self._in_flight += 1
        try:
            output: TokenOutput = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._in_flight -= 1
            cached = self._cached_tokens.pop(request_id, None)
        output.extra_fields["num_cached_tokens"] = cached
        return output

    async def until_it_dies(self) -> None:
        """Never return. Ray fails this call when the process ends; ``ServerWatch`` uses that."""
        await asyncio.Event().wait()

    def _record_meta_info(
        self, generate_request: Callable[..., AsyncIterator[Any]]
    ) -> Callable[..., AsyncIterator[Any]]:
        """Wrap ``generate_request`` to store cached tokens and to decode the routed experts.

        verl's ``generate`` drops the ``meta_info`` of SGLang's answer.
        """

        async def noted(request: Any, http: Any = None) -> AsyncIterator[Any]:
            async for output in generate_request(request, http):
                if isinstance(output, dict) and "cached_tokens" in output["meta_info"]:
                    self._cached_tokens[output["meta_info"]["id"]] = output["meta_info"]["cached_tokens"]
                if isinstance(output, dict) and isinstance(output["meta_info"].get("routed_experts"), str):
                    output["meta_info"]["routed_experts"] = self._routes(output["meta_info"]["routed_experts"])
                yield output

        return noted

    def _routes(self, encoded: str) -> torch.Tensor:
        """Decode the experts in SGLang's answer to the int32 tensor [T, L, K] that verl expects.

        verl assumes that SGLang returns a tensor if skip_tokenizer_init is set; SGLang always
        encodes it in base64.
        """
        text = self.model_config.hf_config.get_text_config()
        flat = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
        return flat.view(-1, text.num_hidden_layers, text.num_experts_per_tok)

    async def _poll(self) -> None:
        """Poll the scheduler's request counts while there are requests.

        Sums the counts over the engine's data-parallel ranks.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._in_flight:
                loads = await self.tokenizer_manager.get_loads(include=["core"])
                running = sum(load.num_running_reqs for load in loads)
                self._polls.append((running, sum(load.num_waiting_reqs for load in loads)))

    async def weight_sums(self, prefix: str) -> list[Sums]:
        """For each rank, ``Sums`` of the weights whose names start with ``prefix``."""
        request = CheckWeightsReqInput(action=f"{ACTION}{prefix}")
        success, message, ranks, _ = await self.tokenizer_manager.check_weights(request)
        assert success and ranks, f"SGLang returned no checksums of its weights: {message}"
        return [rank["sums"] for rank in ranks]

    async def pop_load_polls(self) -> list[tuple[int, int]]:
        """Return (running, queued) of each poll since the last call."""
        polls, self._polls = self._polls, []
        return polls


_early: dict[str, Any] = {}  # servers that verl has not asked for yet, by their names in Ray


def create_servers(count: int) -> None:
    """Start the processes of ``count`` replicas on this node, which then import SGLang."""
    platform = get_platform()
    environment = {**dict.fromkeys(platform.ray_noset_envvars(), "1"), **platform.rollout_env_vars()}
    for rank in range(count):
        name = f"sglang_server_{rank}_0"  # as in verl's SGLangReplica.launch_servers
        options = {"runtime_env": {"env_vars": environment}, "name": name, "max_concurrency": MAX_CALLS}
        _early[name] = ray.remote(MeasuredServer).options(**options).remote()


class ServerClass:
    """Imitates the Ray actor class from which verl creates a server, and returns an early one."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def options(self, **options: Any) -> ServerClass:
        return ServerClass(**options)

    def remote(self, **arguments: Any) -> Any:
        server: Any = _early.pop(self._options["name"], None)
        if server is None:  # on other nodes, and after a restart
            return ray.remote(MeasuredServer).options(**self._options).remote(**arguments)
        server.construct.remote(**arguments)
        return server


class MeasuredReplica(SGLangReplica):
    """verl's n-th replica, with random_seed = run.seed + n.

    verl passes the same engine_kwargs.sglang.random_seed to all replicas. Two engines with the same
    seed would sample the same responses for a group that is spread over both.
    """

    def __init__(self, replica_rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, *args, **kwargs)
        self.server_class = ServerClass()
        self.config = copy.deepcopy(self.config)  # all replicas share the original
        self.config.engine_kwargs[SGLANG.name][SGLANG.seed_argument] += replica_rank

    @property
    def max_concurrency(self) -> int:
        """The number of concurrent calls that Ray allows per server."""
        return MAX_CALLS

    async def launch_servers(self) -> None:
        await super().launch_servers()
        await asyncio.gather(*(worker.__ray_call__.remote(_use_api_key) for worker in self.workers))

    async def relaunch(self) -> None:
        """Restart the servers on the same devices, under the same names, with new ports.

        First kills the replica's remaining servers, if it spans several nodes. Raises RayError if a
        server does not start.
        """
        for server in self.servers:
            ray.kill(server)
            await _wait_until_dead(server)
        self.servers.clear()
        await self.launch_servers()
        if self.rollout_mode == RolloutMode.STANDALONE:
            await asyncio.gather(*(worker.__ray_call__.remote(_forget_engine) for worker in self.workers))


async def _wait_until_dead(server: Any) -> None:
    """Wait until Ray has noticed that the actor is dead, so that its name is free."""
    while True:
        try:
            await server.until_it_dies.remote()
        except ActorUnavailableError:
            await asyncio.sleep(DEAD_POLL_S)
        except RayActorError:
            return


def _use_api_key(_: Any) -> None:
    """Make this process, which sends weights to the servers, use their API key."""
    API_KEY_PATCH.apply()


def _forget_engine(worker: CheckpointEngineWorker) -> None:
    """Make an engine's weight-sync worker look the server up again for the next sync."""
    worker.server_adapter._engine = None
