"""The ranks of SFT touch nothing of a run before the first of them holds it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from retool_mcore.config import SftConfig, load_config
from retool_mcore.errors import ConfigError, RolloutError
from retool_mcore.run.folder import lock_run
from retool_mcore.train import sft
from retool_mcore.train.sft import RankLost, report_lost_rank

SFT = Path(__file__).parents[3] / "configs" / "sft_tiny_cpu.toml"


def test_every_rank_of_a_second_start_is_told_who_holds_the_run_and_writes_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = HashStore()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sft, "die_with_parent", lambda: None)
    config = load_config(SftConfig, SFT, [f"run.root={tmp_path}", "cluster.gpus_per_node=2"])
    with lock_run(config.run.dir):
        for rank in (0, 1):
            monkeypatch.setattr(sft, "rendezvous", lambda *_, rank=rank, **__: iter([(store, rank, 2)]))
            with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on "):
                sft.train(config)
    assert [path.name for path in config.run.dir.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"), RankLost),
        (RuntimeError("writev [10.0.0.2]:4711: Connection reset by peer"), RankLost),
        (RuntimeError("write: Broken pipe"), RankLost),
        (RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), RankLost),
        (dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."), RankLost),
        (RolloutError("Broken pipe: 9 of 10 trajectories were dropped"), RolloutError),
        (RuntimeError("shape mismatch"), RuntimeError),
    ],
)
def test_a_lost_rank_is_told_from_other_errors(error: Exception, kind: type[Exception]):
    with pytest.raises(kind) as ended, report_lost_rank():
        raise error
    assert type(ended.value) is kind


def test_a_signal_of_any_rank_is_known_to_all(monkeypatch: pytest.MonkeyPatch):
    other = {dist.ReduceOp.MAX: lambda own: max(own, 15)}  # of this operation alone the result is a signal
    monkeypatch.setattr(sft.dist, "all_reduce", lambda own, how: own.fill_(other[how](int(own))))
    assert [sft._signal_of_any_rank(own) for own in (0, 2, 30)] == [15, 15, 30]


@pytest.mark.parametrize(("rank", "local_rank", "watched"), [(0, 0, [0]), (1, 1, []), (2, 0, [2])])
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
