"""launch/nodes.py: a node's place and commands, how it restarts a run, and Ray's token."""

import importlib
import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.network import RAY_SECRETS
from retool_mcore.verl.ray_cluster import ray_folder_name

nodes: Any = importlib.import_module("launch.nodes")


@pytest.mark.parametrize(
    ("codes", "waits_s"),
    [*(([code], []) for code in (0, 2, 129, 130, 143)), ([3, 0], [5]), ([3, 1, 2], [5, 10]), ([3] * 4, [5, 10, 20])],
)
def test_a_fault_restarts_the_run_after_longer_and_longer_waits(codes, waits_s, monkeypatch: pytest.MonkeyPatch):
    """A success, a user's error (2) and a stop (143) end it; so does the last of three restarts."""
    left, done = list(codes), list[object]()
    run = SimpleNamespace(wait=lambda: left.pop(0), signal=done.append)
    monkeypatch.setattr(nodes, "Group", lambda *_: run)
    monkeypatch.setattr(nodes, "wait_until", lambda condition, seconds: done.append(seconds))
    monkeypatch.setenv("RESTARTS", "3")
    monkeypatch.setenv("RESTART_WAIT_S", "5")
    assert nodes.Processes(grace_s=1).supervise(["run"], lambda: done.append("the other nodes")) == codes[-1]
    assert done == [each for wait_s in waits_s for each in (signal.SIGKILL, wait_s, "the other nodes")] and not left
    monkeypatch.setenv("RESTARTS", "two")
    with pytest.raises(ConfigError, match=r"RESTARTS = two is not a whole number\. An example is RESTARTS=0"):
        nodes.Processes(grace_s=1).supervise(["run"])


@pytest.mark.parametrize("rank", ["2", "-1", "one"])
def test_a_rank_that_the_run_does_not_have_is_refused(rank: str):
    with pytest.raises(ConfigError, match=f"NODE_RANK = {rank} must be one of 0 to 1"):
        nodes.rank_and_head(2, {"NODE_RANK": rank, "HEAD_IP": "10.0.0.1"})


def test_a_nodes_place_is_the_users_or_else_slurms(monkeypatch: pytest.MonkeyPatch):
    def run(argv: list[str], **_: object) -> SimpleNamespace:
        assert argv == ["scontrol", "show", "hostnames", "n[7-8]"]
        return SimpleNamespace(stdout="n7\nn8\n")

    monkeypatch.setattr(nodes.subprocess, "run", run)
    monkeypatch.setattr(nodes, "ipv4", {"n7": "10.0.0.7"}.__getitem__)
    mine, slurm = {"NODE_RANK": "2", "HEAD_IP": "::2"}, {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[7-8]"}
    cases = (1, mine), (1, slurm), (3, mine | slurm), (3, slurm), (3, {}, True)
    places = [(0, "::2"), (0, "127.0.0.1"), (2, "::2"), (1, "10.0.0.7"), (0, "HEAD_IP")]
    assert [nodes.rank_and_head(*case) for case in cases] == places
    for alone in mine.items():
        with pytest.raises(ConfigError, match="nodes = 3, but NODE_RANK and HEAD_IP are not both set"):
            nodes.rank_and_head(3, dict([alone]))


def test_a_dry_run_shows_what_each_node_would_start(monkeypatch: pytest.MonkeyPatch, capsys):
    env = "TORCH_PORT=29511,NODES_WAIT_S=99,RAY_PORT=7001,NODE_IP=10.0.0.9,SANDBOX_DIR=/s,SANDBOX_OPTIONS=--sessions 9"
    for variable in (*env.split(","), "RAY_START_OPTIONS=--object-store-memory 5"):
        monkeypatch.setenv(*variable.split("="))

    def shown(name: str, rank: int, *settings: str) -> tuple[str, str, list[str]]:
        arguments = [f"configs/{name}.toml", "run.root=/runs", "cluster.nodes=2", *settings]
        run = load_config(SftConfig if name == "sft_tiny_cpu" else RlConfig, arguments[0], arguments[1:])
        node = nodes.Node(arguments, run, rank, "10.0.0.1")
        nodes.show(node, nodes.sft_commands(node) if name == "sft_tiny_cpu" else nodes.rl_commands(node))
        heading, *commands = capsys.readouterr().out.replace(nodes.PYTHON, "python").strip().splitlines()
        assert heading == f"# The commands of node {rank}:"
        return shlex.join(arguments), str(ray_folder_name(run.run.dir, rank)), commands

    words, _, commands = shown("sft_tiny_cpu", 1, "cluster.gpus_per_node=4")
    assert commands == [
        f"python -m retool_mcore preflight {words}",
        "python -m retool_mcore.cli.torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 10.0.0.1 "
        f"--master-port 29511 --rdzv-conf timeout=99 launch/sft_mcore.py {words} &",
    ]
    name = "rl_qwen2.5_32b_h100x16"
    box = f"bash launch/sandbox.sh --socket /s/{name}/sandbox.sock --min-level namespaces --workers"
    of_model = ("sandbox.python=/opt/a b/python", 'sandbox.preload=["pandas", "scipy.stats"]')
    words, ray, commands = shown(name, 0, "sandbox.workers=33", *of_model)
    config, _, settings = words.partition(" ")
    assert commands == [
        f"python -m retool_mcore preflight {words}",
        f"{box} 33 --processes 3 --python '/opt/a b/python' --preload pandas --preload scipy.stats --sessions 9 &",
        "python -m ray.scripts.scripts start --head --include-dashboard false --node-ip-address 10.0.0.1 --port 7001 "
        f"--temp-dir {ray} --disable-usage-stats --block --num-gpus 8 --object-store-memory 5 &",
        f"python -m retool_mcore preflight {words} --cluster --wait-s 99",
        f"python launch/rl.py {config} 'sandbox.where=[\"unix:///s/{name}/sandbox.sock\"]' {settings} sandbox.python= "
        "'sandbox.preload=[]' &",
    ]
    for platform, devices in (("cpu", "--num-gpus 8 --num-cpus 16"), ("ascend", "--resources '{\"NPU\": 8}'")):
        words, ray, commands = shown(name, 1, "sandbox.workers=32", f"run.platform={platform}")
        assert commands == [
            f"python -m retool_mcore preflight {words}",
            f"{box} 32 --processes 2 --sessions 9 &",
            "python -m ray.scripts.scripts start --address 10.0.0.1:7001 --node-ip-address 10.0.0.9 --temp-dir "
            f"{ray} --disable-usage-stats --block {devices} --object-store-memory 5 &",
        ]


def test_nodes_share_a_secret_of_ray_that_no_other_user_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in RAY_SECRETS:
        monkeypatch.delenv(name, raising=False)
    nodes._share_ray_token(SimpleNamespace(folder=tmp_path, rank=0))
    (path,) = tmp_path.iterdir()
    assert (os.environ["RAY_AUTH_TOKEN_PATH"], os.environ["RAY_AUTH_MODE"]) == (str(path), "token")
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text()) == 64
