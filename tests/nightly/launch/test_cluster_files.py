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


def read(name: str) -> str:
    return (LAUNCH / name).read_text(encoding="utf-8")


def pinned(package: str) -> str:
    return str(re.search(rf"^{package}==(\S+)", CONSTRAINTS, re.M)[1])  # type: ignore[index]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined."""
    lines = [line for line in read("Dockerfile").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def base_images() -> list[str]:
    values = dict(argument.split("=") for argument in of("ARG"))
    images = [rest.split()[0] for rest in of("FROM")]
    return [re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], image) for image in images]


def image_home() -> str:
    return of("WORKDIR")[-1]


def pods() -> list[dict[str, Any]]:
    cluster = yaml.safe_load(read("kuberay.yaml"))["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def config_of(text: str) -> dict[str, Any]:
    """The configuration that a file names, itself or by its launch script."""
    if script := re.search(r"launch/\w+_\w+\.sh", text):
        text = (ROOT / script[0]).read_text(encoding="utf-8")
    name = str(re.search(r"configs/[\w.]+\.toml", text)[0])  # type: ignore[index]
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


# Docker and Apptainer


def test_the_image_has_the_python_and_cuda_of_the_constraints():
    version = pinned("cuda-toolkit")
    major_minor = ".".join(version.split(".")[:2])
    for image in [*base_images(), *re.findall(r"docker:(\S+)", read("skypilot.yaml"))]:
        assert image.startswith(f"nvidia/cuda:{major_minor}."), image
    assert set(re.findall(r"cuda-minimal-build-(\d+-\d+)", read("Dockerfile"))) == {major_minor.replace(".", "-")}
    assert f"torch {'.'.join(pinned('torch').split('.')[:2])} uses CUDA {major_minor}." in read("Dockerfile")
    for name in ("Dockerfile", "skypilot.yaml"):
        assert set(re.findall(r"python(3\.\d+)", read(name))) == {"3.12"}
    # glibc: what the wheels were resolved for, and what Ubuntu has
    glibc = tuple(map(int, re.findall(r"manylinux_(\d+)_(\d+)", CONSTRAINTS)[0]))
    assert {"22.04": (2, 35), "24.04": (2, 39)}[base_images()[-1].rpartition("ubuntu")[2]] >= glibc


# Slurm


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f'#!/usr/bin/env bash\necho {name} "$@" >>{folder}/calls\n{text}', encoding="utf-8")
    (folder / name).chmod(0o755)


def slurm(folder: Path, nodes: int = 2, **env: str) -> dict[str, str]:
    """An environment in which Slurm's commands do on this machine what they would do on nodes."""
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
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in ("NODE_RANK", "HEAD_IP")}
    return {
        **clean, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_SUBMIT_DIR": str(ROOT), **env,
    }  # fmt: skip


def submit(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    job = ["bash", str(LAUNCH / "slurm.sbatch"), *words]
    return subprocess.run(job, env=env, cwd="/", capture_output=True, text=True, timeout=300, check=False)


def test_the_job_has_the_nodes_of_its_configuration():
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=True)
    text = read("slurm.sbatch")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.M))
    assert len(options) == text.count("\n#SBATCH")
    first_command = text.index("\nset -")
    assert text.rindex("#SBATCH") < first_command  # sbatch reads no further
    cluster = config_of(str(re.search(r"SCRIPT:=(\S+)\}", text)[0]))["cluster"]  # type: ignore[index]
    assert (int(options["nodes"]), int(options["gpus-per-node"])) == (cluster["nodes"], cluster["gpus_per_node"])
    assert options["ntasks-per-node"] == "1" and options["open-mode"] == "append" and "requeue" in options
    assert options["signal"].startswith("B:USR1@") and "trap requeue USR1" in text


def test_the_job_runs_any_script_and_configuration(tmp_path: Path):
    env = slurm(tmp_path, 1, SCRIPT="launch/rl_h200x8.sh", CONFIG="configs/rl_tiny_cpu.toml")
    done = submit(env, f"run.root={tmp_path}/runs", "train.steps=7", "--dry-run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Nothing was started" in done.stdout and "total_training_steps: " in done.stdout
    assert not (tmp_path / "runs").exists()
    done = submit({**env, "SCRIPT": "launch/no.sh"})
    assert done.returncode == 2 and "Submit from the repository's root" in done.stderr


@pytest.mark.parametrize("image", ["", "retool.sif"])
def test_each_node_of_the_job_has_its_rank(tmp_path: Path, image: str):
    config = "configs/rl_qwen2.5_32b_h100x16.toml"
    # In a container is no scontrol.
    hide = f"rm {tmp_path}/scontrol 2>/dev/null; " if image else ""
    find = "from launch.nodes import find_node; node = find_node('rl', sys.argv[1:], False)"
    script = tmp_path / "place.sh"
    script.write_text(
        f"""{hide}"$PYTHON" -c "import sys; {find}; print('rank', node.rank, 'of', node.head_ip)" {config}\n"""
    )
    done = submit(slurm(tmp_path, SCRIPT=str(script), IMAGE=image))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank .*", done.stdout)) == ["rank 0 of node-0", "rank 1 of node-0"]
    assert ("apptainer exec" in (tmp_path / "calls").read_text()) == bool(image)


@pytest.mark.parametrize("restarts", ["0", "50"])
def test_a_job_whose_time_is_up_ends_its_run_and_is_queued_again(tmp_path: Path, restarts: str):
    script = tmp_path / "run.sh"
    script.write_text(
        f"trap 'kill $!; echo ended >>{tmp_path}/ended; exit 143' TERM; sleep 60 & echo up >>{tmp_path}/up; wait $!\n"
    )
    env = slurm(tmp_path, SCRIPT=str(script), SLURM_RESTART_COUNT=restarts)
    job = subprocess.Popen(["bash", str(LAUNCH / "slurm.sbatch")], env=env, stderr=subprocess.PIPE, text=True)
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


# Kubernetes


def test_the_ray_job_has_the_nodes_of_its_configuration_and_the_ray_of_the_constraints():
    spec = yaml.safe_load(read("kuberay.yaml"))["spec"]
    cluster, config = spec["rayClusterSpec"], config_of(spec["entrypoint"])
    assert 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"]) == config["cluster"]["nodes"]
    for pod in pods():
        ray = pod["spec"]["containers"][0]  # KubeRay starts Ray in the first
        for kind in ("limits", "requests"):
            assert ray["resources"][kind]["nvidia.com/gpu"] == config["cluster"]["gpus_per_node"]
        mounts = {mount["mountPath"]: mount["name"] for mount in ray["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        for folder in ("runs", "data"):  # the configuration's relative paths
            assert "persistentVolumeClaim" in volumes[mounts[f"{image_home()}/{folder}"]]
        assert ray["workingDir"] == image_home() and f"cd {image_home()} " in spec["entrypoint"]
        assert str(pod["spec"]["securityContext"]["fsGroup"]) == of("USER")[-1].split(":")[1]
    assert cluster["rayVersion"] == pinned("ray") and cluster["authOptions"] == {"mode": "token"}


def test_the_run_calls_the_sandbox_of_its_pod():
    entrypoint = yaml.safe_load(read("kuberay.yaml"))["spec"]["entrypoint"]
    config = config_of(entrypoint)
    url = str(re.search(r'sandbox\.where=\["(\S+)"\]', entrypoint)[1])  # type: ignore[index]
    path = url.removeprefix("unix://")
    for pod in pods():
        ray, box = pod["spec"]["containers"]
        options = dict(zip(box["command"][2::2], box["command"][3::2], strict=True))
        assert box["command"][:2] == ["bash", "launch/sandbox.sh"] and box["workingDir"] == image_home()
        assert options["--socket"] == path and int(options["--workers"]) == config["sandbox"]["workers"]
        assert options["--min-level"] in {"namespaces", "landlock"}
        assert box["startupProbe"]["exec"]["command"][-1] == url
        folder = str(Path(path).parent)
        shared = [{mount["mountPath"]: mount["name"] for mount in found["volumeMounts"]} for found in (ray, box)]
        assert shared[0][folder] == shared[1][folder] and set(shared[1]) == {folder}
        assert "emptyDir" in next(v for v in pod["spec"]["volumes"] if v["name"] == shared[1][folder])
        if options["--min-level"] != "landlock":
            assert box["securityContext"]["seccompProfile"] == {"type": "Unconfined"}


@pytest.mark.parametrize("settings", [True, False])
def test_the_entrypoint_is_shell_whose_commands_get_the_setting_whole(tmp_path: Path, settings: bool):
    entrypoint = yaml.safe_load(read("kuberay.yaml"))["spec"]["entrypoint"].replace(f"cd {image_home()}", f"cd {ROOT}")
    stand_in(tmp_path, "python", f"printf '%s\\n' \"$@\" >>{tmp_path}/words; exit {0 if settings else 2}\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(entrypoint, shell=True, env=env, check=False)
    words = (tmp_path / "words").read_text().splitlines()
    calls = 3 if settings else 1  # a preflight that fails ends it
    assert done.returncode == (0 if settings else 2)
    assert words.count('sandbox.where=["unix:///sandbox/sandbox.sock"]') == calls
    assert words.count("configs/rl_qwen2.5_32b_h100x16.toml") == calls


# SkyPilot


def test_the_sky_task_starts_a_launch_script_on_each_node(tmp_path: Path):
    task = yaml.safe_load(read("skypilot.yaml"))
    assert task["workdir"] == "."
    cluster = config_of(task["run"])["cluster"]
    assert task["num_nodes"] == cluster["nodes"]
    assert int(task["resources"]["accelerators"].partition(":")[2]) == cluster["gpus_per_node"]
    assert task["resources"]["image_id"] == f"docker:{base_images()[0]}"
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
    assert "make install-cuda" in task["setup"] and set(task["volumes"]) == {"/shared"}
    stand_in(tmp_path, "bash", 'echo "rank $NODE_RANK of $HEAD_IP"\n')
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    (tmp_path / "bash").write_text((tmp_path / "bash").read_text().replace("/usr/bin/env bash", "/bin/bash"))
    command = ["/bin/bash", "-c", task["run"]]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "rank 1 of 10.0.0.1"


@pytest.mark.parametrize(("restarts", "wait_s"), [("0", "30"), ("1", "120")])
def test_a_start_of_a_job_that_was_queued_again_gives_the_old_one_time_to_end(
    tmp_path: Path, restarts: str, wait_s: str
):
    script = tmp_path / "wait.sh"
    script.write_text("""$PYTHON -c 'from launch.nodes import number; print("waits", number("LOCK_WAIT_S"), "s")'\n""")
    done = submit(slurm(tmp_path, 1, SCRIPT=str(script), SLURM_RESTART_COUNT=restarts))
    assert f"waits {wait_s} s" in done.stdout, done.stderr


def test_a_run_that_fails_is_not_queued_again(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("exit 3\n")
    done = submit(slurm(tmp_path, SCRIPT=str(script)))
    assert done.returncode == 3 and "requeue" not in (tmp_path / "calls").read_text()


def test_apptainer_starts_from_the_image_that_docker_built():
    text = read("retool.def")
    header = dict(re.findall(r"^(\w+): (\S+)$", text, re.M))
    tag = str(re.search(r"docker build -f launch/Dockerfile -t (\S+)", read("Dockerfile"))[1])  # type: ignore[index]
    assert header == {"Bootstrap": "docker-daemon", "From": tag}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert tag == f"retool_mcore:{version}" and tag in read("README.md")
    assert {container["image"] for pod in pods() for container in pod["spec"]["containers"]} == {tag}
    for section in re.findall(r"^%(\w+)", text, re.M):
        assert section in {"post", "environment", "runscript", "test", "labels", "files", "help"}
    for path in of("ENV")[0].split():
        assert path.partition("=")[0] in ("\\",) or f"export {path}" in text
