"""Weights in buckets of one allocation reach SGLang's model bit for bit, by one handle a bucket."""

import asyncio
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.platforms import flat_buckets, get_platform

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
LIMIT = 4096


@pytest.fixture(scope="module")
def patched():
    """verl's two functions as the patches leave them, and as they were."""
    get_platform("cpu").activate()
    from sglang.srt.weight_sync.utils import update_weights
    from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

    buckets, send = (each.replace for each in flat_buckets.FLAT_BUCKET_PATCHES)
    return SimpleNamespace(buckets=buckets(get_named_tensor_buckets), send=send(update_weights))


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
        **{f"expert{number}": torch.randn(16, 16).bfloat16() for number in range(40)},
        "larger than a bucket": torch.randn(2, LIMIT),
    }


def buckets_of(patched, sent: dict[str, torch.Tensor], **more: Any) -> list[flat_buckets.Named]:
    async def all_of_them() -> list[flat_buckets.Named]:
        return [each async for each in patched.buckets(iter(sent.items()), LIMIT, **more)]

    return asyncio.run(all_of_them())


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, bytes(plain.numpy())


def test_a_bucket_is_one_allocation_and_no_larger_than_the_limit(patched, monkeypatch):
    monkeypatch.setattr(flat_buckets, "FIRST_BYTES", LIMIT // 4)
    sent = weights()
    buckets = buckets_of(patched, sent)
    assert [name for bucket in buckets for name, _ in bucket] == list(sent)
    assert {name: bits(tensor) for bucket in buckets for name, tensor in bucket} == {
        name: bits(tensor) for name, tensor in sent.items()
    }
    sizes = []
    for bucket in buckets:
        [storage] = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
        assert storage not in {tensor.untyped_storage().data_ptr() for tensor in sent.values()}
        sizes.append(bucket[0][1].untyped_storage().nbytes())
    assert sizes[:3] == [LIMIT // 4, LIMIT // 2, LIMIT]
    assert max(sizes[:-1]) == LIMIT
    assert sizes[-1] == 2 * LIMIT * 4


def loaded(request: Any) -> dict[str, torch.Tensor]:
    """What SGLang's model is given to load from a request."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.utils import MultiprocessingSerializer

    assert (request.load_format, request.flush_cache) == ("flattened_bucket", False)
    [mine] = request.serialized_named_tensors
    got: list[tuple[str, torch.Tensor]] = []
    runner: Any = SimpleNamespace(model=SimpleNamespace(load_weights=got.extend))
    ModelRunner._update_weights_from_flattened_bucket(runner, MultiprocessingSerializer.deserialize(mine))
    return {name: tensor.clone() for name, tensor in got}


def test_sglang_loads_what_was_sent_from_one_handle_a_bucket(patched, monkeypatch):
    from sglang.srt.utils import patch_torch
    from torch.multiprocessing.reductions import reduce_tensor

    monkeypatch.setattr(patch_torch, "monkey_patch_torch_reductions", lambda: None)  # knows devices alone
    packed: list[torch.Tensor] = []
    one = lambda tensor: packed.append(tensor) or reduce_tensor(tensor)  # noqa: E731
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, one)
    monkeypatch.setattr(torch.distributed, "gather_object", lambda mine, of_ranks, **_: of_ranks.__setitem__(0, mine))
    mesh = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1, mesh=torch.tensor([0]), get_group=lambda: None)
    got: dict[str, torch.Tensor] = {}

    class Engine:
        async def update_weights_from_tensor(self, request: Any) -> None:
            got.update(loaded(request))

    sent = weights()
    buckets = buckets_of(patched, sent)
    for bucket in buckets:
        asyncio.run(patched.send(Engine(), bucket, "infer_tp", {"infer_tp": mesh}))
    assert {name: bits(tensor) for name, tensor in got.items()} == {name: bits(each) for name, each in sent.items()}
    assert len(packed) == len(buckets) < len(sent)


@pytest.mark.parametrize(
    "batch",
    [
        [("a", torch.ones(2)), ("b", torch.ones(3))],  # each with memory of its own
        [("a", torch.arange(6.0).view(2, 3).t())],  # not in the order of its memory
    ],
)
def test_what_is_no_such_bucket_goes_as_verl_sends_it(batch):
    sent = []

    async def original(*arguments: Any) -> str:
        sent.append(arguments)
        return "answered"

    send = flat_buckets.FLAT_BUCKET_PATCHES[1].replace(original)
    assert asyncio.run(send("engine", batch, "infer_tp", "mesh")) == "answered"
    assert sent == [("engine", batch, "infer_tp", "mesh", None)]


def test_matrices_that_belong_together_stay_with_verl(patched):
    parts = {"x.a": torch.ones(2), "y": torch.ones(2), "x.b": torch.ones(2)}
    buckets = buckets_of(patched, parts, fusion_groups=((".a", ".b"),))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["y", "x.a", "x.b"]]


def test_the_next_bucket_is_filled_while_the_engine_loads_one_and_none_further(patched, monkeypatch):
    monkeypatch.setattr(flat_buckets, "FIRST_BYTES", 512)
    taken, alive = [], []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            taken.append(number)
            yield str(number), torch.full((100,), float(number))  # 400 bytes: one in a bucket

    async def load_all() -> None:
        async for bucket in patched.buckets(source(), 512):
            alive.append(weakref.ref(bucket[0][1].untyped_storage()))
            at_first = len(taken)
            await asyncio.sleep(20 * flat_buckets.SENT_S)  # as for an engine's answer
            number = int(bucket[0][0])
            assert (at_first, len(taken)) == (min(number + 2, 6), min(number + 3, 6))
            assert float(bucket[0][1].sum()) == 100 * number
            assert [each() is None for each in alive[:-1]] == [True] * number, "a bucket that was sent is kept"

    asyncio.run(load_all())
    assert len(alive) == 6


def test_an_engine_that_dies_in_a_sync_ends_it(patched, monkeypatch, caplog):
    monkeypatch.setattr(flat_buckets, "FIRST_BYTES", 512)
    taken = []

    async def load_all() -> None:
        sent = ((str(number), taken.append(number) or torch.ones(100)) for number in range(6))
        async for _ in patched.buckets(sent, 512):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(load_all())
    assert taken == [0, 1] and not caplog.records
