"""The queue starts beside the driver's own work, and whoever needs it waits."""

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
if torch.accelerator.is_available():
    pytest.skip("platform cpu refuses an accelerator", allow_module_level=True)
from retool_mcore.platforms import get_platform
from retool_mcore.verl.plugin import assert_loaded

get_platform("cpu").activate()  # verl imports here
assert_loaded()
import transfer_queue as tq  # noqa: E402

from retool_mcore.verl import early_queue  # noqa: E402
from retool_mcore.verl.early_queue import queue_beside, wait_for_queue  # noqa: E402


class Start:
    """``transfer_queue.init``, which goes on when it is let."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.go, self.given, self._problem = threading.Event(), list[Any](), problem

    def __call__(self, conf: Any = None) -> Any:
        assert self.go.wait(10)
        if self._problem:
            raise self._problem
        self.given.append(conf)
        return conf


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_queue, "_starts", [])


def test_the_driver_goes_on_while_the_queue_starts_and_waits_when_it_needs_it(monkeypatch: pytest.MonkeyPatch):
    start = Start()
    monkeypatch.setattr(tq, "init", start)
    with queue_beside():
        assert tq.init({"units": 2}) == {"units": 2}, "though nothing has started"
        assert not start.given
        threading.Timer(0.1, start.go.set).start()
        wait_for_queue()
        assert start.given == [{"units": 2}]
        wait_for_queue()  # by another part of the driver
        tq.init()
        assert start.given == [{"units": 2}, None], "a client of the queue that is there"
    assert tq.init is start


def test_whoever_waits_is_told_why_the_queue_did_not_start(monkeypatch: pytest.MonkeyPatch):
    start = Start(ValueError("no such sampler"))
    start.go.set()
    monkeypatch.setattr(tq, "init", start)
    with queue_beside():
        tq.init({})
        with pytest.raises(ValueError, match="no such sampler"):
            wait_for_queue()


def test_a_checkpoint_is_loaded_when_the_queue_is_there(monkeypatch: pytest.MonkeyPatch):
    """It fills the queue with the prompts that were in flight."""
    from retool_mcore.verl import trainer

    order: list[str] = []

    def looked(run: Any) -> Any:
        order.append("checkpoint")
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "wait_for_queue", lambda: order.append("queue"))
    monkeypatch.setattr(trainer.checkpoint, "find_resume", looked)
    made: Any = object.__new__(trainer.ReToolTrainer)
    made._run = None
    with pytest.raises(KeyboardInterrupt):
        made._load_checkpoint()
    assert order == ["queue", "checkpoint"]
