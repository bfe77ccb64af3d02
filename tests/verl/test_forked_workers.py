"""Workers are forked from a process with the imports done, or start as usual without one."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import psutil
import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl import ray_cluster, worker_command
from tests.e2e.commands import wait_until
from tests.scenario import ROOT

WAIT_S = 60.0

WORKER = """
import json, os, sys, time
known = "numpy" in sys.modules
import numpy
print(json.dumps({
    "known": known, "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0),
    "words": sys.argv[1:], "name": __name__,
    "path": sys.path[0], "folder": os.getcwd(), "environment": dict(os.environ), "random": numpy.random.random(),
}), flush=True)
if sys.argv[1] == "stay":
    time.sleep(300)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Generator[subprocess.Popen[str]]:
    with serving(tmp_path, ["numpy"]) as process:
        yield process
        process.kill()


def serving(folder: Path, modules: Sequence[str]) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "retool_mcore.verl.forked_workers", str(folder / "forks"), *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "ONLY_THE_SERVERS": "1"}
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_until(lambda: (folder / "forks").exists() or process.poll() is not None, "the socket", WAIT_S)
    return process


def client(folder: Path, script: Path, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", worker_command.__file__, str(folder / "forks"), str(script), *words]
    environment = {"PATH": os.environ["PATH"], "WORKERS_OWN": "2"}
    return subprocess.Popen(argv, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_is_what_its_command_says_with_the_imports_done(
    server: subprocess.Popen[str], script: Path, tmp_path: Path
):
    workers = [client(tmp_path, script, "3", "two words") for _ in range(2)]
    first, second = (told(worker) for worker in workers)
    assert [worker.wait(30) for worker in workers] == [3, 3]
    assert (first["known"], first["parent"], first["words"]) == (True, server.pid, ["3", "two words"])
    assert (first["name"], first["path"], first["folder"]) == ("__main__", str(script.parent), str(tmp_path))
    assert first["group"] == first["pid"] != second["group"]
    assert first["environment"]["WORKERS_OWN"] == "2"
    assert "ONLY_THE_SERVERS" not in first["environment"]
    assert first["random"] != second["random"]


@pytest.mark.parametrize("killed", ["client", "worker", "server"])
def test_client_and_worker_end_together(killed: str, server: subprocess.Popen[str], script: Path, tmp_path: Path):
    lasting, other = client(tmp_path, script, "stay"), client(tmp_path, script, "stay")
    worker, others = told(lasting)["pid"], told(other)["pid"]
    os.kill({"client": lasting.pid, "worker": worker, "server": server.pid}[killed], signal.SIGKILL)
    assert lasting.wait(30) == -signal.SIGKILL
    wait_until(lambda: gone(worker), "the worker's end", WAIT_S)
    if killed == "server":
        assert other.wait(30) == -signal.SIGKILL
        wait_until(lambda: gone(others), "the other worker's end", WAIT_S)
    else:
        assert not gone(others)
        other.kill()


def test_clients_and_workers_that_end_at_once_leave_the_server(
    server: subprocess.Popen[str], script: Path, tmp_path: Path
):
    pairs = [client(tmp_path, script, "stay") for _ in range(4)]
    workers = [told(each)["pid"] for each in pairs]
    os.kill(server.pid, signal.SIGSTOP)  # so that it sees all of them in one look
    for pid in (*workers, *(each.pid for each in pairs)):
        os.kill(pid, signal.SIGKILL)
    for each in pairs:
        each.wait(30)
    os.kill(server.pid, signal.SIGCONT)
    assert told(client(tmp_path, script, "0"))["parent"] == server.pid
    wait_until(lambda: not psutil.Process(server.pid).children(), "the workers' end", WAIT_S)


def test_a_worker_that_cannot_begin_ends_and_forks_nothing(server: subprocess.Popen[str], script: Path, tmp_path: Path):
    request = {"words": [str(script), "stay"], "environment": {}, "folder": str(tmp_path / "gone")}
    with socket.socket(socket.AF_UNIX) as asking, Path(os.devnull).open("w") as nowhere:
        asking.connect(str(tmp_path / "forks"))
        socket.send_fds(asking, [json.dumps(request).encode() + b"\n"], [nowhere.fileno()] * 3)
        assert asking.makefile().readlines() == ["forked\n", "1\n"]
    assert told(client(tmp_path, script, "0"))["parent"] == server.pid


def test_without_a_server_a_worker_starts_as_usual(script: Path, tmp_path: Path):
    worker = client(tmp_path, script, "4")
    said = told(worker)
    assert worker.wait(30) == 4
    assert (said["known"], said["pid"], said["words"]) == (False, worker.pid, ["4"])
    assert said["environment"]["WORKERS_OWN"] == "2"


def test_a_server_that_takes_too_long_is_not_waited_for_and_forks_no_second_worker(
    server: subprocess.Popen[str], script: Path, tmp_path: Path
):
    os.kill(server.pid, signal.SIGSTOP)
    words = [str(tmp_path / "forks"), str(script), "4"]
    code = f"from retool_mcore.verl import worker_command as it; it.WAIT_S = 1.0; it.main(*{words})"
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    said = told(worker)
    assert worker.wait(30) == 4
    assert (said["known"], said["pid"]) == (False, worker.pid)
    os.kill(server.pid, signal.SIGCONT)
    later = client(tmp_path, script, "0")
    assert told(later)["parent"] == server.pid
    assert worker.stdout is not None and worker.stdout.read() == ""


@pytest.mark.parametrize(
    ("source", "why"),
    [("file = open('/dev/full', 'w')", "opened {'/dev/full'}"), ("import ray", "Ray imported: True")],
    ids=["device", "ray"],
)
def test_what_does_not_survive_a_fork_is_not_forked(source: str, why: str, script: Path, tmp_path: Path):
    (tmp_path / "harmful.py").write_text(source)
    with serving(tmp_path, ["numpy", "harmful"]) as server:
        worker = client(tmp_path, script, "0")  # asks while the modules are imported
        assert server.wait(60) == 1
        assert server.stderr is not None
        assert why in server.stderr.read()
    said = told(worker)
    assert worker.wait(30) == 0
    assert (said["known"], said["pid"]) == (False, worker.pid)


def test_a_module_that_is_not_installed_is_left_out(script: Path, tmp_path: Path):
    with serving(tmp_path, ["no_such_module", "numpy"]) as server:
        assert told(client(tmp_path, script, "0"))["known"]
        server.kill()


@pytest.mark.parametrize(
    ("platform", "overrides"),
    [("ascend", []), ("cpu", ["verl_overrides.global_profiler.tool=nsys"])],
    ids=["no modules", "nsys starts the processes itself"],
)
def test_where_workers_are_not_forked(platform: str, overrides: list[str], tmp_path: Path):
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", overrides)
    assert ray_cluster._start_forks(config, get_platform(platform), tmp_path) is None


@pytest.mark.usefixtures("verl_on_cpu")
def test_a_users_own_environment_of_workers_is_kept_and_comes_first():
    from omegaconf import OmegaConf

    from retool_mcore.verl.runner import with_own_environment

    own = {"env_vars": {"MINE": "1"}, "py_executable": None}
    tree = OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": 16, "runtime_env": own}}})
    joined = {"address": "127.0.0.1:1", "runtime_env": {"py_executable": "ours"}}
    merged = with_own_environment(joined, tree)
    assert merged == {"address": "127.0.0.1:1", "runtime_env": {"env_vars": {"MINE": "1"}, "py_executable": "ours"}}
    tree.ray_kwargs.ray_init.runtime_env.py_executable = "mine"
    assert with_own_environment(joined, tree).runtime_env.py_executable == "mine"
