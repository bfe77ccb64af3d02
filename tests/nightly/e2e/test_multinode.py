"""Two hosts, the CPU platform, the launch scripts as on two real nodes: run, lose a host, run the
same again. A cable that is out: tests/e2e/test_watchdog.py. Nodes with other data or settings:
tests/unit/preflight/test_preflight.py.
"""

import subprocess
import time
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import argv_sft, assert_nothing_left, last_step, sft_settings, succeed, wait_until
from tests.e2e.test_rl import settings
from tests.nightly.e2e.two_hosts import Host, two_hosts, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
TWO_NODES = ("run.name=two", "cluster.nodes=2", "cluster.gpus_per_node=1")
EXACT = ("step", "loss", "grad_norm", "lr", "perf/total_num_tokens", "loss_tokens")


class Job:
    """A launch script with its words, on two hosts."""

    def __init__(self, kind: str, script: str, words: tuple[str, ...], mark: str) -> None:
        self.script, self.words, self.mark = f"launch/{script}", words, mark
        self.env = {"CONFIG": f"configs/{kind}_tiny_cpu.toml", "HEAD_WAIT_S": "120"}
        self.env |= {"RAY_START_OPTIONS": "--object-store-memory 300000000"}  # of RL's script

    def start(self, host: Host, rank: int) -> subprocess.Popen[str]:
        return host.start(self.script, self.words, {**self.env, "NODE_RANK": str(rank)}, self.mark)

    def start_until(self, hosts: tuple[Host, Host], run_dir: Path, step: int) -> list[subprocess.Popen[str]]:
        both = [self.start(host, rank) for rank, host in enumerate(hosts)]
        wait_until(lambda: last_step(run_dir) >= step or both[0].poll() is not None, f"step {step}", 900)
        assert last_step(run_dir) >= step, logs(hosts)
        return both


def logs(hosts: tuple[Host, Host]) -> str:
    return "\n".join(f"--- {host.address}\n{host.log()[-4000:]}" for host in hosts)


def test_sft_over_two_nodes_loses_one_and_continues(task: Path, tmp_path: Path, mark: str):
    succeed(argv_sft(*sft_settings(task, tmp_path, "run.name=whole")), mark)
    job = Job("sft", "sft_h200x8.sh", sft_settings(task, tmp_path, *TWO_NODES), mark)
    with two_hosts(tmp_path / "hosts") as hosts:
        both = job.start_until(hosts, tmp_path / "two", 5)
        hosts[1].kill()
        assert both[0].wait(timeout=300) != 0, "the other node must not wait for ever for the one that is gone"
        assert_nothing_left(mark)
        both = [job.start(host, rank) for rank, host in enumerate(hosts)]
        assert [node.wait(timeout=300) for node in both] == [0, 0], logs(hosts)
        assert_nothing_left(mark)
    rows, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "whole"))
    assert [{k: row[k] for k in EXACT} for row in rows] == [{k: row[k] for k in EXACT} for row in expected]


def test_rl_over_two_ray_nodes_loses_one_and_continues_when_it_comes_late(task: Path, tmp_path: Path, mark: str):
    words, run_dir = settings(task, tmp_path, "rollout.agent_workers=2", *TWO_NODES), tmp_path / "two"
    job = Job("rl", "rl_h100x16.sh", words, mark)
    with two_hosts(tmp_path / "hosts") as hosts:
        both = job.start_until(hosts, run_dir, 3)
        assert "0 errors, 0 warnings, 2 checks passed" in hosts[0].log()  # two joined, and both are alike
        hosts[1].kill()
        assert both[0].wait(timeout=240) != 0, "the head must end with an error when a node is gone"
        assert_nothing_left(mark)
        head = job.start(hosts[0], 0)
        ray_log = run_dir / "logs/ray_node0.log"
        wait_until(lambda: "Ray runtime started" in ray_log.read_text() or head.poll() is not None, "Ray runs", 200)
        time.sleep(15)
        assert head.poll() is None, logs(hosts)
        late = job.start(hosts[1], 1)
        assert head.wait(timeout=900) == 0, logs(hosts)
        assert late.wait(timeout=180) == 0, logs(hosts)
        assert_nothing_left(mark)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["training/rollout_probs_diff_max"] <= 1e-4 for row in rows)
    states = sorted(path.parent.name for path in (run_dir / "checkpoints").glob("*/state.json"))
    assert states == ["global_step_2", "global_step_4"]
