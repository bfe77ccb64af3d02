"""Weights reach engines bit for bit in flat buckets; a TCP transport without a peer ends."""

import asyncio
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.errors import PlatformError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.patches_verl import send_as_one_tensor

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


def weights() -> dict[str, torch.Tensor]:
    buffer = torch.randn(64)
    return {
        "view": buffer[7:31].view(4, 6),
        "transposed": buffer[:12].view(3, 4).t(),
        "odd": torch.randn(7).to(torch.float8_e4m3fn),  # what follows must not start at byte 7
        "float32": torch.randn(5, 3),
        "bfloat16": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "trained": torch.nn.Parameter(torch.randn(2, 2)),
    }


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, bytes(plain.numpy())


class Engine:
    """Loads the weights of a request as SGLang's model does."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    async def update_weights_from_tensor(self, request: Any) -> None:
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.utils import MultiprocessingSerializer

        assert (request.load_format, request.flush_cache) == ("flattened_bucket", False)
        mine, of_rank_1 = request.serialized_named_tensors
        assert of_rank_1 == "of rank 1"
        runner: Any = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        ModelRunner._update_weights_from_flattened_bucket(runner, MultiprocessingSerializer.deserialize(mine))

    def load(self, named: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in named}


def test_sglang_loads_the_sent_weights_from_one_handle(monkeypatch: pytest.MonkeyPatch):
    get_platform("cpu").activate()
    from sglang.srt.utils import patch_torch
    from sglang.srt.weight_sync.utils import update_weights
    from torch.multiprocessing.reductions import reduce_tensor

    monkeypatch.setattr(patch_torch, "monkey_patch_torch_reductions", lambda: None)  # knows devices alone
    packed: list[torch.Tensor] = []
    one = lambda tensor: packed.append(tensor) or reduce_tensor(tensor)  # noqa: E731
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, one)

    def gather(mine: Any, of_ranks: list[Any], dst: int, group: str) -> None:
        assert (of_ranks, dst, group) == ([None, None], 4, "tp")
        of_ranks[:] = [mine, "of rank 1"]

    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    mesh = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 2, mesh=torch.tensor([4, 5]), get_group=lambda: "tp")
    engine, sent = Engine(), weights()
    asyncio.run(send_as_one_tensor(update_weights)(engine, list(sent.items()), "infer_tp", {"infer_tp": mesh}))
    assert {name: bits(each) for name, each in engine.loaded.items()} == {name: bits(sent[name]) for name in sent}
    assert len(packed) == 1


def test_a_sender_or_a_receiver_without_a_peer_ends_after_its_timeout():
    get_platform("cpu").activate()
    from retool_mcore.platforms.cpu.weights import TcpCheckpointEngine

    found = TcpCheckpointEngine.build_topology(2, 1, ["", "of actor 1", "of the engine"])
    assert found == ({"receivers": [["of the engine"], []]}, {"receivers": [[]]})
    sender = TcpCheckpointEngine(1 << 20, is_master=True, timeout_s=0.3)
    worker = TcpCheckpointEngine(1 << 20, timeout_s=0.3)
    sender.init_process_group(receivers=[worker.prepare()])
    with pytest.raises(PlatformError, match="the actor sent no weights"):
        next(worker.receive_weights())
    worker.finalize()
    with pytest.raises(PlatformError, match="accepted no weights"):
        asyncio.run(sender.send_weights((f"layer.{n}", torch.zeros(1 << 20)) for n in range(64)))
    sender.finalize()
