"""verl's checkpoint engine `tcp`: sends weights from the actor to engines on other devices.

verl imports this module (rollout.checkpoint_engine.custom_backend_module) in the trainer, in every
actor process and in the weight-sync worker of every engine. For each sync, every weight-sync worker
opens a port. The actor's first rank connects to all of these ports and sends each tensor as one
message. The worker forwards it to its engine's server through verl's adapter.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
import zmq
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.cpu.patches import WEIGHTS_PATCH

TIMEOUT_S = 300.0  # per message, for sending and receiving; the first gather of an export can take long
MESSAGES_AHEAD = 4  # queue length of sender and receiver, in tensors


@CheckpointEngineRegistry.register("tcp")
class TcpCheckpointEngine(CheckpointEngine):
    """One process's end of the transport.

    ``is_master``: whether this is the actor's first rank, which sends. Ignores verl's
    ``bucket_size``.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self.is_master = is_master
        self.timeout_s = timeout_s
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []

    def prepare(self) -> str:
        """Open a port for one sync and return its address; the sender returns ""."""
        if self.is_master:
            return ""
        host = ray.util.get_node_ip_address()
        port = self._open(zmq.PULL).bind_to_random_port(f"tcp://{host}")
        return f"tcp://{host}:{port}"

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of ``init_process_group`` for each actor rank and each receiver.

        The sender gets the receivers' addresses; all others get an empty list.
        """
        addresses = metadata[actor_wg_world_size:]
        nobody: list[str] = []
        return (
            {"receivers": [addresses, *[nobody] * (actor_wg_world_size - 1)]},
            {"receivers": [nobody] * rollout_world_size},
        )

    def init_process_group(self, receivers: Sequence[str]) -> None:
        for address in receivers:
            self._open(zmq.PUSH).connect(address)

    def finalize(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)  # verl calls this after all weights have arrived
        self._sockets.clear()

    @torch.no_grad()
    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send all weights. Raises PlatformError if a receiver accepts none for ``timeout_s``."""
        for name, weight in weights:  # on every rank, because the export is collective
            if self.is_master:
                header = json.dumps([name, str(weight.dtype).removeprefix("torch."), list(weight.shape)]).encode()
                # Let zmq copy the weight: it may be a view of Megatron's buffer, which the next
                # step overwrites.
                self._send(header, weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        if self.is_master:
            self._send(b"")

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors in the order sent.

        Raises PlatformError if none arrives for ``timeout_s``.
        """
        WEIGHTS_PATCH.apply()  # in the worker, whose adapter sends these weights to its engine
        [socket] = self._sockets
        while True:
            try:
                header, *payload = socket.recv_multipart()
            except zmq.Again as error:
                raise PlatformError(
                    f"the actor sent no weights for {self.timeout_s:.0f} s. The run's log shows what the actor was "
                    "doing. The same command resumes from the last checkpoint."
                ) from error
            if not payload:
                return
            name, dtype, shape = json.loads(header)
            yield name, torch.frombuffer(bytearray(payload[0]), dtype=getattr(torch, dtype)).reshape(shape)

    def _open(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, MESSAGES_AHEAD)
        socket.setsockopt(zmq.RCVHWM, MESSAGES_AHEAD)
        socket.setsockopt(zmq.SNDTIMEO, int(self.timeout_s * 1000))
        socket.setsockopt(zmq.RCVTIMEO, int(self.timeout_s * 1000))
        self._sockets.append(socket)
        return socket

    def _send(self, *parts: Any) -> None:
        for socket in self._sockets:
            try:
                socket.send_multipart(parts)
            except zmq.Again as error:
                raise PlatformError(
                    f"a rollout engine's worker accepted no weights for {self.timeout_s:.0f} s. The run's log shows "
                    "what the engine was doing. The same command resumes from the last checkpoint."
                ) from error
