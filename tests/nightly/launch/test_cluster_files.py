"""What a cluster's user starts from: each file parsed, and held against what it refers to.

Nothing of it runs on its real system here. The Slurm job runs with stand-ins for Slurm's commands.
"""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch"
CONSTRAINTS = (ROOT / "retool_mcore" / "platforms" / "cuda" / "constraints.txt").read_text(encoding="utf-8")
HOME = "/opt/retool_mcore"  # in the image


def read(name: str) -> str:
    return (LAUNCH / name).read_text(encoding="utf-8")


def found(pattern: str, text: str) -> str:
    """What the pattern's only group matches in the text."""
    [match] = set(re.findall(pattern, text, re.M))
    return match


def pods() -> list[dict[str, Any]]:
    cluster = yaml.safe_load(read("kuberay.yaml"))["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def config_of(text: str) -> dict[str, Any]:
    """The configuration that a file names, itself or by its launch script."""
    if script := re.search(r"launch/\w+_\w+\.sh", text):
        text = (ROOT / script[0]).read_text(encoding="utf-8")
    return tomllib.loads((ROOT / re.findall(r"configs/[\w.]+\.toml", text)[0]).read_text(encoding="utf-8"))


def test_each_file_has_the_nodes_of_its_configuration_and_the_packages_of_the_constraints():
    slurm, sky, kube = read("slurm.sbatch"), yaml.safe_load(read("skypilot.yaml")), yaml.safe_load(read("kuberay.yaml"))
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", slurm, re.M))
    assert len(options) == slurm.count("\n#SBATCH")
    assert slurm.rindex("#SBATCH") < slurm.index("\nset -")  # sbatch reads no further than the first command
    assert options["ntasks-per-node"] == "1" and options["open-mode"] == "append" and "requeue" in options
    assert options["signal"].startswith("B:USR1@")
    cluster = kube["spec"]["rayClusterSpec"]
    ray_nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    gpus = [pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods()]
    for text, nodes, per_node in (
        (found(r"SCRIPT:=(\S+?)\}", slurm), options["nodes"], options["gpus-per-node"]),
        (sky["run"], sky["num_nodes"], sky["resources"]["accelerators"].partition(":")[2]),
        *((kube["spec"]["entrypoint"], ray_nodes, each) for each in gpus),
    ):
        config = config_of(text)["cluster"]
        assert (int(nodes), int(per_node)) == (config["nodes"], config["gpus_per_node"]), text
    assert cluster["rayVersion"] == found(r"^ray==(\S+)", CONSTRAINTS) and cluster["authOptions"] == {"mode": "token"}
    cuda = ".".join(found(r"^cuda-toolkit==(\S+)", CONSTRAINTS).split(".")[:2])
    assert found(r"cuda-minimal-build-(\d+-\d+)", read("Dockerfile")) == cuda.replace(".", "-")
    assert found(r"docker:nvidia/cuda:(\d+\.\d+)\.", read("skypilot.yaml")) == cuda
    tag = found(r"docker build -f launch/Dockerfile -t (\S+)", read("Dockerfile"))
    assert {container["image"] for pod in pods() for container in pod["spec"]["containers"]} == {tag}


# Slurm


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >>{folder}/calls\n{text}', encoding="utf-8")
    (folder / name).chmod(0o755)


def submit(folder: Path, script: str, nodes: int = 2, **env: str) -> subprocess.Popen[str]:
    """The job with this script, where Slurm's commands do here what they would do on nodes."""
    names = "\n".join(f"node-{rank}" for rank in range(nodes))
    ranks = " ".join(map(str, range(nodes)))
    stand_in(folder, "scontrol", f"[ $1 = requeue ] || echo '{names}'\n")
    run_all = f'for rank in {ranks}; do SLURM_NODEID=$rank "$@" & echo $! >>{folder}/pids; done\n'
    others = f"kill -TERM $(cat {folder}/pids) 2>/dev/null"  # --kill-on-bad-exit
    failed = f"{{ code=$?; {others}; ((ended)) || ended=$code; }}"  # the first that fails ends the others
    waited = f"ended=0; for pid in $(cat {folder}/pids); do wait $pid || {failed}; done; exit $ended\n"
    stand_in(folder, "srun", "while [[ $1 == --* ]]; do shift; done\n" + run_all + waited)
    stand_in(folder, "scancel", f"kill -TERM $(cat {folder}/pids)\n")
    stand_in(folder, "apptainer", 'while [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"\n')
    (folder / "script.sh").write_text(script + "\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in ("NODE_RANK", "HEAD_IP")}
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_SUBMIT_DIR": str(ROOT),
        "SCRIPT": str(folder / "script.sh"),
    }  # fmt: skip
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "configs/rl_qwen2.5_32b_h100x16.toml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**clean, **own, **env}, cwd="/", text=True, **pipes)


@pytest.mark.parametrize("image", ["", "retool.sif"])
def test_each_node_of_the_job_has_its_rank(tmp_path: Path, image: str):
    hide = f"rm {tmp_path}/scontrol 2>/dev/null; " if image else ""  # a container has none
    find = "from launch.nodes import find_node; node = find_node('rl', sys.argv[1:], False)"
    show = f"""{hide}"$PYTHON" -c "import sys; {find}; print('rank', node.rank, 'of', node.head_ip)" $1"""
    job = submit(tmp_path, show, IMAGE=image)
    stdout, stderr = job.communicate(timeout=300)
    assert job.returncode == 0, stderr
    assert sorted(re.findall(r"rank .*", stdout)) == ["rank 0 of node-0", "rank 1 of node-0"]
    assert ("apptainer exec" in (tmp_path / "calls").read_text()) == bool(image)


@pytest.mark.parametrize("restarts", ["0", "50"])
def test_a_job_whose_time_is_up_ends_its_run_and_is_queued_again(tmp_path: Path, restarts: str):
    end = f"trap 'kill $!; echo ended >>{tmp_path}/ended; exit 143' TERM"
    job = submit(tmp_path, f"{end}; sleep 60 & echo up >>{tmp_path}/up; wait $!", SLURM_RESTART_COUNT=restarts)
    end_s = time.monotonic() + 300
    while not (tmp_path / "up").exists() or (tmp_path / "up").read_text().count("up") < 2:
        assert time.monotonic() < end_s and job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    _, stderr = job.communicate(timeout=300)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (tmp_path / "ended").read_text().split() == ["ended", "ended"]
    assert not [call for call in calls if call.startswith("scancel")], "it would end Ray under a run that saves"
    again = restarts == "0"
    assert job.returncode == (0 if again else 1), stderr
    assert ("scontrol requeue 7" in calls) == again


@pytest.mark.parametrize(("restarts", "wait_s"), [("0", "30"), ("1", "120")])
def test_a_run_that_fails_is_not_queued_again_and_one_that_was_gives_the_old_one_time_to_end(
    tmp_path: Path, restarts: str, wait_s: str
):
    show = """$PYTHON -c 'from launch.nodes import number; print("waits", number("LOCK_WAIT_S"), "s")'; exit 3"""
    job = submit(tmp_path, show, 1, SLURM_RESTART_COUNT=restarts)
    stdout, stderr = job.communicate(timeout=300)
    assert f"waits {wait_s} s" in stdout, stderr
    assert job.returncode == 3 and "requeue" not in (tmp_path / "calls").read_text()


# Kubernetes


def test_the_run_calls_the_sandbox_of_its_pod_and_has_its_folders():
    entrypoint = yaml.safe_load(read("kuberay.yaml"))["spec"]["entrypoint"]
    url = found(r'sandbox\.where=\["(\S+)"\]', entrypoint)
    path = Path(url.removeprefix("unix://"))
    for pod in pods():
        ray, box = pod["spec"]["containers"]  # KubeRay starts Ray in the first
        options = dict(zip(box["command"][2::2], box["command"][3::2], strict=True))
        assert box["command"][:2] == ["bash", "launch/sandbox.sh"] and options["--socket"] == str(path)
        assert int(options["--workers"]) == config_of(entrypoint)["sandbox"]["workers"]
        assert box["startupProbe"]["exec"]["command"][-1] == url
        mounts, of_box = ({mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]} for each in (ray, box))
        assert of_box == {str(path.parent): mounts[str(path.parent)]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert f"cd {HOME} " in entrypoint and ray["workingDir"] == box["workingDir"] == HOME
        for folder in ("runs", "data"):  # the configuration's relative paths
            assert "persistentVolumeClaim" in volumes[mounts[f"{HOME}/{folder}"]]
