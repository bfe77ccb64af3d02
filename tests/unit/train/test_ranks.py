"""The ranks of SFT touch nothing of a run before the first of them holds it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import HashStore

from retool_mcore.cli.common import guarded
from retool_mcore.config import SftConfig, load_config
from retool_mcore.errors import EXIT_RETRYABLE, ConfigError, RolloutError
from retool_mcore.run.folder import lock_run
from retool_mcore.train import sft
from retool_mcore.train.sft import locked_by_rank_0, report_lost_rank

SFT = Path(__file__).parents[3] / "configs" / "sft_tiny_cpu.toml"


def test_every_rank_is_told_who_holds_the_run(tmp_path: Path):
    store = HashStore()
    with lock_run(tmp_path / "run"):
        for rank in (0, 1):
            with (
                pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on "),
                locked_by_rank_0(store, rank, tmp_path / "run"),
            ):
                pytest.fail("it went on")


def test_the_other_ranks_wait_for_the_first(tmp_path: Path):
    store, went_on = HashStore(), threading.Event()

    def second() -> None:
        with locked_by_rank_0(store, 1, tmp_path):
            went_on.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not went_on.wait(0.3)
    with locked_by_rank_0(store, 0, tmp_path):
        assert went_on.wait(10)
    thread.join()


def test_a_second_start_does_not_write_to_the_logs_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.train import sft

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sft, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(sft, "die_with_parent", lambda: None)
    config = load_config(SftConfig, SFT, [f"run.root={tmp_path}", "cluster.gpus_per_node=2"])
    with lock_run(config.run.dir), pytest.raises(ConfigError, match="is in use by process"):
        sft.train(config)
    assert [path.name for path in config.run.dir.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"),
        RuntimeError("writev [10.0.0.2]:4711: Connection reset by peer"),
        RuntimeError("write: Broken pipe"),
        RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"),
        dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."),
        RolloutError("9 of 10 trajectories of step 1 (train) were dropped"),
    ],
)
def test_a_lost_rank_can_be_started_again(error: Exception):
    """launch/nodes.py starts again what ends with this code, and not what ends with 2."""

    @guarded
    def rank() -> None:
        with report_lost_rank():
            raise error

    with pytest.raises(typer.Exit) as ended:
        rank()
    assert ended.value.exit_code == EXIT_RETRYABLE


def test_a_signal_of_any_rank_is_known_to_all(monkeypatch: pytest.MonkeyPatch):
    other = {dist.ReduceOp.MAX: lambda own: max(own, 15)}  # of this operation alone the result is a signal
    monkeypatch.setattr(sft.dist, "all_reduce", lambda own, how: own.fill_(other[how](int(own))))
    assert [sft._signal_of_any_rank(own) for own in (0, 2, 30)] == [15, 15, 30]


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shape"), report_lost_rank():
        raise RuntimeError("shape mismatch")


@pytest.mark.parametrize(("rank", "local_rank", "watched"), [(0, 0, [0]), (1, 1, []), (2, 0, [2]), (3, 1, [])])
def test_the_first_rank_of_each_node_has_a_watchdog(
    rank: int, local_rank: int, watched: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Two nodes of two ranks. Where the network is gone, node 0 ends nobody on the other."""
    found: list[int] = []

    @contextmanager
    def watchdog(config: object, terminal: object, rank: int) -> Iterator[None]:
        found.append(rank)
        yield

    simulated = ("_run", "assert_loaded", "die_with_parent", "dist", "get_platform")
    for name in (*simulated, "locked_by_rank_0", "redirect_output"):
        monkeypatch.setattr(sft, name, mock.MagicMock())
    monkeypatch.setattr(sft, "rendezvous", lambda *_, **__: iter([(HashStore(), rank, 4)]))
    monkeypatch.setattr(sft, "Watchdog", watchdog)
    for name, value in {"WORLD_SIZE": 4, "RANK": rank, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))
    sft.train(load_config(SftConfig, SFT, [f"run.root={tmp_path}", "cluster.nodes=2", "cluster.gpus_per_node=2"]))
    assert found == watched
