"""Weights between processes on platform `cpu`: bit for bit, to every receiver, and an error where
one is gone.
"""

import asyncio
import threading

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.errors import PlatformError
from retool_mcore.platforms import get_platform

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


@pytest.fixture(scope="module")
def engine_class():
    get_platform("cpu").activate()
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from retool_mcore.platforms.cpu import weights  # noqa: F401  registers it

    return CheckpointEngineRegistry.get("tcp")


def connected(engine_class, actors: int, workers: int, timeout_s: float = 10.0):
    """Engines as verl's manager makes and connects them: the actor's, the workers'."""
    ends = [engine_class(1 << 20, is_master=rank == 0, timeout_s=timeout_s) for rank in range(actors)]
    ends += [engine_class(1 << 20, timeout_s=timeout_s) for _ in range(workers)]
    for_actors, for_workers = engine_class.build_topology(actors, workers, [end.prepare() for end in ends])
    for end, receivers in zip(ends, for_actors["receivers"] + for_workers["receivers"], strict=True):
        end.init_process_group(receivers=receivers)
    return ends[:actors], ends[actors:]


def test_every_worker_gets_every_weight_bit_for_bit_update_after_update(engine_class):
    buffer = torch.randn(4096)
    sent = {
        "view": buffer[7:31].view(4, 6),
        "transposed": buffer[:12].view(3, 4).t(),
        "bfloat16": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        **{f"layer.{number}": torch.randn(64, 64) for number in range(32)},
    }
    for _ in range(2):
        actors, workers = connected(engine_class, actors=2, workers=2)
        got: list[dict[str, torch.Tensor]] = [{}, {}]
        threads = [
            threading.Thread(target=lambda end=end, into=into: into.update(end.receive_weights()))
            for end, into in zip(workers, got, strict=True)
        ]
        for thread in threads:
            thread.start()
        walked = []
        for actor in actors:
            asyncio.run(actor.send_weights((walked.append(name) or (name, sent[name])) for name in sent))
        for thread in threads:
            thread.join(timeout=300)
        for end in actors + workers:
            end.finalize()
        assert walked == [*sent, *sent], "every rank of the actor takes part in the export"
        for weights in got:
            assert list(weights) == list(sent)
            for name, weight in weights.items():
                assert weight.dtype == sent[name].dtype and torch.equal(weight, sent[name])
        buffer.add_(1.0)  # views of it are sent next


def test_an_end_that_hears_nothing_ends_with_an_error(engine_class):
    [sender], [worker] = connected(engine_class, actors=1, workers=1, timeout_s=0.3)
    with pytest.raises(PlatformError, match="no weights came from the actor"):
        next(worker.receive_weights())
    worker.finalize()
    with pytest.raises(PlatformError, match="took no weights"):
        asyncio.run(sender.send_weights((f"layer.{n}", torch.zeros(1 << 20)) for n in range(64)))
    sender.finalize()
