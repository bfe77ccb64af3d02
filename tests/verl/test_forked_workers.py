"""Workers are forked from a process with the imports done, or start as usual without one."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl import ray_cluster, worker_command
from retool_mcore.verl.forked_workers import environment
from tests.e2e.commands import wait_until
from tests.scenario import ROOT

WAIT_S = 60.0

WORKER = """
import json, os, sys, time
known = "numpy" in sys.modules
import numpy, setproctitle
setproctitle.setproctitle("sglang::something")
print(json.dumps({
    "known": known, "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0),
    "words": sys.argv[1:], "name": __name__,
    "files": {int(number): os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")},
    "title": open("/proc/self/cmdline").read().rstrip("\\0"),
    "path": sys.path[0], "folder": os.getcwd(), "environment": dict(os.environ), "random": numpy.random.random(),
}), flush=True)
if sys.argv[1] == "stay":
    time.sleep(300)
sys.exit(int(sys.argv[1]))
"""

SPAWNER = """
import json, multiprocessing, os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
from retool_mcore.verl.forked_workers import fork_children

def child(pipe, then):
    pipe.send({"known": "numpy" in sys.modules, "pid": os.getpid(), "parent": os.getppid()})
    if then == "quit":
        os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's processes tell their server that they have failed
        os._exit(1)
    if then != "end":
        time.sleep(300)
    sys.exit(5)

def quit(*_):
    print("quit", flush=True)
    os._exit(7)

if __name__ == "__main__":
    fork_children()
    for name, value in (variable.split("=") for variable in sys.argv[2:]):
        os.sched_setaffinity(0, {int(value)}) if name == "CORE" else os.environ.update({name: value})
    signal.signal(signal.SIGQUIT, quit)
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(writer, sys.argv[1]))
    process.start()
    writer.close()
    shared = SharedMemory(create=True, size=1)
    print(json.dumps({"own": os.getpid(), "shared": shared.name, **reader.recv()}), flush=True)
    shared.unlink() if sys.argv[1] == "end" else None
    process.join()
    print(process.exitcode, flush=True)
    try:
        reader.recv()
    except EOFError:
        print("nothing holds the child's end of the pipe", flush=True)
"""


SAVED = "libutil.so.1"  # of glibc, and nothing here is linked with it
SAVER = f"""
import os
from contextlib import contextmanager

@contextmanager
def configure_subprocess():
    os.environ["LD_PRELOAD"] = {SAVED!r}
    yield
"""


@pytest.fixture
def spawner(tmp_path: Path) -> Path:
    path = tmp_path / "spawner.py"
    path.write_text(SPAWNER)
    return path


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


def serving(folder: Path, modules: Sequence[str], through: Sequence[str] = ()) -> subprocess.Popen[str]:
    words = ["-m", "retool_mcore.verl.forked_workers", str(folder / "forks"), *modules]
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "ONLY_THE_SERVERS": "1"}
    variables, before = environment(str(folder / "forks")) | more, set(folder.glob("forks*"))
    argv = [sys.executable, *through, *words]
    process = subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_until(lambda: set(folder.glob("forks*")) > before or process.poll() is not None, "the socket", WAIT_S)
    return process


def client(folder: Path, script: Path, *words: str) -> subprocess.Popen[str]:
    argv = [*worker_command.argv(str(folder / "forks")), str(script), *words]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "WORKERS_OWN": "2"}
    with (folder / "of_the_parent").open("w") as left_open:  # as raylet leaves files of its own
        given, pipe = (left_open.fileno(),), subprocess.PIPE
        return subprocess.Popen(argv, env=variables, cwd=folder, stdout=pipe, text=True, pass_fds=given)


def ask(asking: socket.socket, folder: Path, script: Path, where: str, files: dict[int, int]) -> None:
    """Ask for a worker that is to have these files, by the numbers that they get."""
    request = {"words": [str(script), "3"], "environment": {}, "folder": where, "numbers": list(files)}
    request["cores"] = list(os.sched_getaffinity(0))
    asking.connect(str(folder / "forks"))
    socket.send_fds(asking, [json.dumps(request).encode() + b"\n"], list(files.values()))


def asked(folder: Path, script: Path, where: str, *numbers: int) -> list[str]:
    """What the server says when a worker with files of these numbers, too, is asked for."""
    with socket.socket(socket.AF_UNIX) as asking, Path(os.devnull).open("w") as nowhere:
        ask(asking, folder, script, where, dict.fromkeys((0, 1, 2, *numbers), nowhere.fileno()))
        return asking.makefile().readlines()


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
    assert first["title"] == "sglang::something"
    assert first["group"] == first["pid"] != second["group"]
    assert first["environment"]["WORKERS_OWN"] == "2"
    assert "ONLY_THE_SERVERS" not in first["environment"]
    assert first["random"] != second["random"]
    assert str(tmp_path / "of_the_parent") not in first["files"].values()


def test_what_was_imported_is_never_looked_at_for_garbage(tmp_path: Path):
    (tmp_path / "imported.py").write_text("import gc\nduring = gc.isenabled()\nmany = [[] for _ in range(50_000)]\n")
    script = tmp_path / "worker.py"
    script.write_text(
        "import gc, imported, json\n"
        "print(json.dumps({'during': imported.during, 'now': gc.isenabled(), 'left_out': gc.get_freeze_count()}))\n"
    )
    with serving(tmp_path, ["imported"]) as process:
        worker = told(client(tmp_path, script))
        process.kill()
    assert (worker["during"], worker["now"]) == (False, True) and worker["left_out"] > 50_000


def test_each_file_gets_its_number(server: subprocess.Popen[str], script: Path, tmp_path: Path):
    """Also where the file at that number, as it was sent, is to get another.

    And where the number is that of another worker's connection in the server.
    """
    others = [client(tmp_path, script, "stay") for _ in range(3)]
    assert all(told(each)["parent"] == server.pid for each in others)
    numbers = range(60, 2, -1)
    paths = [tmp_path / f"of_{number}" for number in numbers]
    reader, writer = os.pipe()
    with ExitStack() as opened, socket.socket(socket.AF_UNIX) as asking:
        files = [opened.enter_context(path.open("w")).fileno() for path in paths]
        streams = {0: reader, 1: writer, 2: 2}
        ask(asking, tmp_path, script, str(tmp_path), streams | dict(zip(numbers, files, strict=True)))
        os.close(writer)
        with open(reader) as said:
            found = json.loads(said.readline())["files"]
    assert [found.get(str(number)) for number in numbers] == [str(path) for path in paths]


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
    assert asked(tmp_path, script, str(tmp_path / "gone")) == ["forked\n", "1\n"]
    assert told(client(tmp_path, script, "0"))["parent"] == server.pid


def test_what_a_worker_spawns_is_a_fork_too(
    server: subprocess.Popen[str], spawner: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    worker = client(tmp_path, spawner, "end")
    child = told(worker)
    assert (child["known"], child["parent"]) == (True, server.pid)
    assert child["pid"] != child["own"]
    assert worker.communicate(timeout=30)[0].splitlines() == ["5", "nothing holds the child's end of the pipe"]
    assert capfd.readouterr().err == "", "what the server held is closed once, whoever has its number since"


@pytest.mark.parametrize("variable", ["LD_PRELOAD=", f"CORE={min(os.sched_getaffinity(0))}", "A=B"])
def test_a_child_with_other_libraries_before_all_others_or_cores_of_its_own_starts_as_usual(
    server: subprocess.Popen[str], spawner: Path, tmp_path: Path, variable: str
):
    """An empty list of libraries loads none, and is another list."""
    if "CORE" in variable and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core")
    worker = client(tmp_path, spawner, "end", variable)
    child = told(worker)
    assert (child["known"], child["parent"]) == ((True, server.pid) if variable == "A=B" else (False, child["own"]))
    assert worker.communicate(timeout=30)[0].splitlines() == ["5", "nothing holds the child's end of the pipe"]


def test_a_child_as_a_cuda_engine_that_sleeps_starts_it_is_the_fork_of_a_process_with_its_library(
    server: subprocess.Popen[str], spawner: Path, tmp_path: Path
):
    """torch_memory_saver's own function, over a library that is here in place of its own."""
    (tmp_path / "torch_memory_saver.py").write_text(SAVER)
    with serving(tmp_path, ["numpy"], ("-m", "retool_mcore.platforms.cuda.preloaded")) as second:
        wait_until(lambda: SAVED in Path(f"/proc/{second.pid}/maps").read_text(), "the library", WAIT_S)
        said = {
            variable: told(client(tmp_path, spawner, "end", variable))
            for variable in (f"LD_PRELOAD={SAVED}", "A=B", f"LD_PRELOAD={SAVED}:")
        }
        parents = [(child["known"], child["parent"]) for child in said.values()]
        other = said[f"LD_PRELOAD={SAVED}:"]["own"]
        assert parents == [(True, second.pid), (True, server.pid), (False, other)]
        second.terminate()
        assert second.wait(30) == 0


@pytest.mark.parametrize(("number", "heard"), [(20, []), (200, ["forked\n", "3\n"])])
def test_a_file_that_a_module_of_the_server_holds_is_kept(number: int, heard: list[str], script: Path, tmp_path: Path):
    (tmp_path / "holds_files.py").write_text("import os\nheld = [os.open('/dev/null', 0) for _ in range(40)]\n")
    server = serving(tmp_path, ["holds_files"])
    try:
        assert asked(tmp_path, script, str(tmp_path), number) == heard
    finally:
        server.kill()


def test_a_spawned_childs_signal_to_its_parent_reaches_the_worker(
    server: subprocess.Popen[str], spawner: Path, tmp_path: Path
):
    worker = client(tmp_path, spawner, "quit")
    child = told(worker)
    assert worker.wait(30) == 7
    assert worker.stdout is not None
    assert worker.stdout.read() == "quit\n"
    wait_until(lambda: gone(child["pid"]), "the child's end", WAIT_S)
    assert server.poll() is None


def test_a_spawned_child_ends_with_its_worker(server: subprocess.Popen[str], spawner: Path, tmp_path: Path):
    worker = client(tmp_path, spawner, "stay")
    child = told(worker)
    os.kill(child["own"], signal.SIGKILL)
    wait_until(lambda: gone(child["pid"]), "the child's end", WAIT_S)
    wait_until(lambda: not Path("/dev/shm", child["shared"]).exists(), "the end of what it has shared", WAIT_S)
    wait_until(lambda: not psutil.Process(server.pid).children(), "that none is left", WAIT_S)


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
    assert ray_cluster._start_forks(config, get_platform(platform), tmp_path) == []


@pytest.mark.parametrize(("gpus", "processes"), [(0, 2), (1, 1)])
def test_engines_on_devices_of_the_actor_are_forked_from_a_process_with_their_library(gpus: int, processes: int):
    mode = ("train.mode=async", f"rollout.gpus={gpus}") if gpus else ()
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", ("cluster.gpus_per_node=2", *mode))
    assert [bool(each.through) for each in get_platform("cuda").forked_from(config)] == [False, True][:processes]


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
