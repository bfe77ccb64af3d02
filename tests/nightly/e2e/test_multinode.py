"""Two hosts, the CPU platform, the launch scripts as on two real nodes: run, lose a host, run the
same again.
"""

import re
import shutil
import time
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import argv_sft, assert_nothing_left, last_step, sft_settings, succeed, wait_until
from tests.nightly.e2e.two_hosts import Host, two_hosts, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
SFT_SCRIPT, RL_SCRIPT = "launch/sft_h200x8.sh", "launch/rl_h100x16.sh"
TWO_NODES = ("cluster.nodes=2", "cluster.gpus_per_node=1")
EXACT = ("step", "loss", "grad_norm", "lr", "perf/total_num_tokens", "loss_tokens")


def start_both(hosts: tuple[Host, Host], script: str, words: tuple[str, ...], env: dict[str, str], mark: str) -> list:
    return [host.start(script, words, {**env, "NODE_RANK": str(i)}, mark) for i, host in enumerate(hosts)]


def logs(hosts: tuple[Host, Host]) -> str:
    return "\n".join(f"--- {host.address}\n{host.log()[-4000:]}" for host in hosts)


def test_sft_over_two_nodes_loses_one_and_continues(task: Path, tmp_path: Path, mark: str):
    succeed(argv_sft(*sft_settings(task, tmp_path, "run.name=whole")), mark)
    words = sft_settings(task, tmp_path, "run.name=two", *TWO_NODES)
    env = {"CONFIG": "configs/sft_tiny_cpu.toml", "HEAD_WAIT_S": "120"}
    run_dir = tmp_path / "two"
    with two_hosts(tmp_path / "hosts") as hosts:
        both = start_both(hosts, SFT_SCRIPT, words, env, mark)
        wait_until(lambda: last_step(run_dir) >= 5 or both[0].poll() is not None, "step 5", 600)
        assert last_step(run_dir) >= 5, logs(hosts)
        hosts[1].kill()
        assert both[0].wait(timeout=300) != 0, "the other node must not wait for ever for the one that is gone"
        assert_nothing_left(mark)
        both = start_both(hosts, SFT_SCRIPT, words, env, mark)
        assert [node.wait(timeout=300) for node in both] == [0, 0], logs(hosts)
        assert_nothing_left(mark)
    rows, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "whole"))
    assert [{k: row[k] for k in EXACT} for row in rows] == [{k: row[k] for k in EXACT} for row in expected]


def test_an_unplugged_cable_ends_both_nodes_and_the_run_resumes(task: Path, tmp_path: Path, mark: str):
    stall_s = 45
    words = sft_settings(task, tmp_path, "run.name=two", "train.steps=40", f"train.stall_s={stall_s}", *TWO_NODES)
    env = {"CONFIG": "configs/sft_tiny_cpu.toml", "HEAD_WAIT_S": "120"}
    run_dir = tmp_path / "two"
    with two_hosts(tmp_path / "hosts") as hosts:
        both = start_both(hosts, SFT_SCRIPT, words, env, mark)
        wait_until(lambda: last_step(run_dir) >= 5 or both[0].poll() is not None, "step 5", 600)
        hosts[1].unplug()
        # Torch alone would wait half an hour for an answer.
        assert [node.wait(timeout=stall_s + 120) for node in both] == [3, 3], logs(hosts)
        assert f"train.stall_s = {stall_s}" in hosts[0].log(), logs(hosts)
        assert_nothing_left(mark)
    with two_hosts(tmp_path / "again") as hosts:
        both = start_both(hosts, SFT_SCRIPT, words, env, mark)
        assert [node.wait(timeout=300) for node in both] == [0, 0], logs(hosts)
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, 41))


def test_a_node_with_other_data_and_settings_ends_the_start(task: Path, tmp_path: Path, mark: str):
    other = tmp_path / "other"
    shutil.copytree(task, other)
    train = other / "sft_train.parquet"
    shutil.copy(task / "sft_val.parquet", train)
    # Both nodes name the same path; on the second another file lies there.
    env = {"CONFIG": "configs/sft_tiny_cpu.toml", "HEAD_WAIT_S": "120"}
    words = sft_settings(tmp_path / "data", tmp_path, "run.name=two", "data.allow_overlap=true", *TWO_NODES)
    shutil.copytree(task, tmp_path / "data")
    with two_hosts(tmp_path / "hosts") as hosts:
        mount = tmp_path / "mounted.sh"
        mount.write_text(f'mount --bind {train} {tmp_path}/data/sft_train.parquet && exec bash {SFT_SCRIPT} "$@"\n')
        both = [
            hosts[0].start(SFT_SCRIPT, words, {**env, "NODE_RANK": "0"}, mark),
            hosts[1].start(str(mount), (*words, "optim.lr=0.5"), {**env, "NODE_RANK": "1"}, mark),
        ]
        assert [node.wait(timeout=240) != 0 for node in both] == [True, True], logs(hosts)
        assert "the nodes differ: data.train_file" in hosts[0].log(), logs(hosts)
        assert re.search(r"optim\.lr is \S+ on \S+ and 0\.5 on ", hosts[0].log()), logs(hosts)
    assert not (tmp_path / "two" / "metrics.jsonl").exists()


def rl_settings(task: Path, root: Path, *more: str) -> tuple[str, ...]:
    files = (f"data.train_file={task}/rl_train.parquet", f'validation.files=["{task}/rl_val.parquet"]')
    size = ("train.prompts_per_step=4", "train.mini_batch_prompts=4", "rollout.group_size=4", "rollout.agent_workers=2")
    steps = ("train.steps=4", "validation.every=4", "checkpoint.every_steps=2", "run.name=two")
    return (f"run.root={root}", f"model.path={task}/model", *files, *size, *steps, *TWO_NODES, *more)


RL_ENV = {"CONFIG": "configs/rl_tiny_cpu.toml", "HEAD_WAIT_S": "120",
          "RAY_START_OPTIONS": "--object-store-memory 300000000"}  # fmt: skip


def test_rl_over_two_ray_nodes_loses_one_and_continues_when_it_comes_late(task: Path, tmp_path: Path, mark: str):
    words, run_dir = rl_settings(task, tmp_path), tmp_path / "two"
    with two_hosts(tmp_path / "hosts") as hosts:
        both = start_both(hosts, RL_SCRIPT, words, RL_ENV, mark)
        wait_until(lambda: last_step(run_dir) >= 3 or both[0].poll() is not None, "step 3", 900)
        assert last_step(run_dir) >= 3, logs(hosts)
        assert "0 errors, 0 warnings, 2 checks passed" in hosts[0].log()  # two joined, and both are alike
        hosts[1].kill()
        assert both[0].wait(timeout=240) != 0, "the head must end with an error when a node is gone"
        assert_nothing_left(mark)
        head = hosts[0].start(RL_SCRIPT, words, {**RL_ENV, "NODE_RANK": "0"}, mark)
        ray_log = run_dir / "logs/ray_node0.log"
        wait_until(lambda: "Ray runtime started" in ray_log.read_text() or head.poll() is not None, "Ray runs", 200)
        time.sleep(15)
        assert head.poll() is None, logs(hosts)
        late = hosts[1].start(RL_SCRIPT, words, {**RL_ENV, "NODE_RANK": "1"}, mark)
        assert head.wait(timeout=900) == 0, logs(hosts)
        assert late.wait(timeout=180) == 0, logs(hosts)
        assert_nothing_left(mark)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["training/rollout_probs_diff_max"] <= 1e-4 for row in rows)
    states = sorted(path.parent.name for path in (run_dir / "checkpoints").glob("*/state.json"))
    assert states == ["global_step_2", "global_step_4"]
