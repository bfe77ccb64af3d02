"""Run SFT or RL on this node: start what it needs, restart it after a fault, stop everything.

    python launch/nodes.py (sft | rl) CONFIG [section.key=value ...] [--dry-run]

The launch scripts set the environment of their hardware and then become this process. On several
nodes, start the same command on each. In SFT each node starts its own ranks. In RL node 0 drives
the run, and the other nodes provide their GPUs through Ray until node 0 leaves.

Environment: NODE_RANK and HEAD_IP (under Slurm they are derived from the job), the names in
``DEFAULTS``, and optionally PYTHON, DRY_RUN, NODE_IP, SANDBOX_DIR, SANDBOX_OPTIONS,
RAY_START_OPTIONS, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import IO, TYPE_CHECKING, Any

from retool_mcore.errors import EXIT_RETRYABLE, EXIT_USER_ERROR, ConfigError, PlatformError, ReToolError
from retool_mcore.process import die_with_parent
from retool_mcore.run.folder import lock_run, require_unlocked
from retool_mcore.run.signals import SIGNALS, exit_code

if TYPE_CHECKING:
    from retool_mcore.config import RunConfig

DEFAULTS = {
    "RESTARTS": 0,  # maximum number of restarts after a fault
    "RESTART_WAIT_S": 10,  # before the first restart; doubles with each restart
    "RAY_PORT": 6379,
    "TORCH_PORT": 29500,
    "HEAD_WAIT_S": 25,  # longest wait for node 0 to answer
    "NODES_WAIT_S": 120,  # longest wait for all nodes to join
    "LOCK_WAIT_S": 30,  # longest wait for an earlier start of this run to exit, as when Slurm requeues a job
}
PYTHON = os.environ.get("PYTHON") or sys.executable
PROGRAMS = {"sft": [PYTHON, "launch/sft_mcore.py"], "rl": [PYTHON, "launch/rl.py"]}
RETOOL = [PYTHON, "-m", "retool_mcore"]
MARGIN_S = 20  # for a run to exit, after the grace_s that it has for saving
SERVICES_END_S = 5
LOST_AFTER_S = 3  # node 0 or Ray counts as lost after this time without an answer
CPU_ACTORS = 16  # `ray start --num-cpus` on platform cpu; most actors are idle

_signals: list[int] = []  # the stop signals received so far


def main(kind: str, *words: str) -> int:
    for how in SIGNALS:
        if signal.getsignal(how) != signal.SIG_IGN:  # ignored under nohup, for example
            signal.signal(how, lambda received, _: _signals.append(received))
    os.environ.setdefault("PYTHON", PYTHON)  # launch/sandbox.sh reads it
    arguments = [word for word in words if word != "--dry-run"]
    dry_run = "--dry-run" in words or bool(os.environ.get("DRY_RUN"))
    if dry_run and (code := subprocess.call([*PROGRAMS[kind], *arguments, "--dry-run"])):
        return code
    try:
        node = find_node(kind, arguments, dry_run)
        commands = sft_commands(node) if kind == "sft" else rl_commands(node)
        return show(node, commands) if dry_run else carry_out(node, commands)
    except ReToolError as error:
        say(f"error: {error}")
        return EXIT_USER_ERROR


# The commands of this node, in order


@dataclass(frozen=True)
class Node:
    arguments: list[str]  # from the command line: the run file and the overrides
    run: "RunConfig"
    rank: int
    head_ip: str

    @property
    def folder(self) -> Path:
        return self.run.run.dir


Commands = dict[str, list[Any]]


def sft_commands(node: Node) -> Commands:
    torchrun = [PYTHON, "-m", "retool_mcore.cli.torchrun", "--nnodes", node.run.cluster.nodes, "--node-rank", node.rank]
    torchrun += ["--nproc-per-node", node.run.cluster.gpus_per_node, "--master-addr", node.head_ip]
    torchrun += ["--master-port", number("TORCH_PORT"), "--rdzv-conf", f"timeout={number('NODES_WAIT_S')}"]
    return {
        "preflight": [*RETOOL, "preflight", *node.arguments],
        "run": [*torchrun, PROGRAMS["sft"][1], *node.arguments],
    }


def rl_commands(node: Node) -> Commands:
    """Return the RL commands of this node. On a single node, the run itself starts Ray."""
    preflight = [*RETOOL, "preflight", *node.arguments]
    commands: Commands = {"preflight": preflight, "sandbox": sandbox_command(node)}
    if node.run.cluster.nodes > 1:
        commands["ray"] = ray_command(node)
    if node.rank == 0:
        if node.run.cluster.nodes > 1:
            commands["nodes"] = [*preflight, "--cluster", "--wait-s", number("NODES_WAIT_S")]
        config, *settings = node.arguments
        where = f"sandbox.where={json.dumps([f'unix://{sandbox_folder(node)}/sandbox.sock'])}"
        # The sandbox service has these settings; a run with a remote sandbox must not set them.
        commands["run"] = [*PROGRAMS["rl"], config, where, *settings, "sandbox.python=", "sandbox.preload=[]"]
    return commands


def show(node: Node, commands: Commands) -> int:
    print(f"\n# The commands of node {node.rank}:", flush=True)  # noqa: T201
    for name, command in commands.items():
        waits = name in ("preflight", "nodes")
        print(shlex.join(map(str, command)) + ("" if waits else " &"), flush=True)  # noqa: T201
    return 0


def carry_out(node: Node, commands: Commands) -> int:
    """Execute the commands and return the run's exit code.

    Locks the run's folder before it changes anything there.
    """
    with ExitStack() as folders, Processes(node.run.checkpoint.grace_s).stopped_at_end() as processes:
        processes.locks.append(lock(node.folder, f".lock.node{node.rank}"))
        require_unlocked(node.folder)
        processes.require(commands["preflight"])
        if "sandbox" in commands:
            start_sandbox(node, processes, commands["sandbox"])
        if "run" not in commands:
            return serve(node, processes, commands["ray"], folders)
        if "ray" in commands:
            start_ray(node, processes, commands["ray"], folders)
            processes.require(commands["nodes"])
        elif node.rank != 0:
            wait_for_head(node.head_ip, number("TORCH_PORT"))

        def wait_for_other_nodes() -> None:
            if "nodes" in commands:
                processes.require(commands["nodes"])
            elif node.rank != 0:  # SFT: wait until node 0's old torchrun is gone
                port = number("TORCH_PORT")
                wait_until(lambda: not answers(node.head_ip, port), number("NODES_WAIT_S") / 2)

        return processes.supervise(commands["run"], before_restart=wait_for_other_nodes)


# Which node this is


def find_node(kind: str, arguments: list[str], dry_run: bool) -> Node:
    """Read the settings. Export them for preflight, which compares nodes. Raises ConfigError."""
    # Imported here because it takes half a second, and the signal handlers must be set before.
    from retool_mcore.cli.common import settings_of
    from retool_mcore.config import RlConfig, SftConfig, load_config
    from retool_mcore.preflight.cluster import NODE_SETTINGS

    config, *settings = arguments
    run = load_config(SftConfig if kind == "sft" else RlConfig, config, settings_of(settings, None))
    os.environ[NODE_SETTINGS] = "\n".join([str(Path(config).resolve()), *settings])
    return Node(arguments, run, *rank_and_head(run.cluster.nodes, os.environ, dry_run))


def rank_and_head(nodes: int, env: Mapping[str, str], dry_run: bool = False) -> tuple[int, str]:
    """Return this node's rank and node 0's address: NODE_RANK and HEAD_IP, or Slurm's.

    Raises ConfigError.
    """
    rank, head_ip = env.get("NODE_RANK", ""), env.get("HEAD_IP", "")
    if nodes == 1:
        return 0, head_ip or "127.0.0.1"
    if not rank and "SLURM_NODEID" in env:
        try:
            list_nodes = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
            first = subprocess.run(list_nodes, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"cluster.nodes = {nodes}, but scontrol cannot list the nodes of SLURM_JOB_NODELIST here ({error}). "
                "Set NODE_RANK and HEAD_IP on each node, or start launch/slurm.sbatch."
            ) from error
        rank, head_ip = env["SLURM_NODEID"], ipv4(first) or first
    if dry_run:
        rank, head_ip = rank or "0", head_ip or "HEAD_IP"
    if not rank or not head_ip:
        raise ConfigError(
            f"cluster.nodes = {nodes}, but NODE_RANK and HEAD_IP are not both set. Set them on each node, or use Slurm."
        )
    if not rank.isdecimal() or int(rank) >= nodes:
        raise ConfigError(f"NODE_RANK = {rank} must be one of 0 to {nodes - 1}, because cluster.nodes = {nodes}.")
    return int(rank), head_ip


def number(name: str) -> int:
    """Return an integer of DEFAULTS, or its value in the environment. Raises ConfigError."""
    value = os.environ.get(name) or str(DEFAULTS[name])
    if not value.isdecimal():
        raise ConfigError(f"{name} = {value} is not a whole number. An example is {name}={DEFAULTS[name]}.")
    return int(value)


def ipv4(host: str) -> str:
    """Return an IPv4 address of ``host``, or ""."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError:
        return ""


# Waiting


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def pause(seconds: float) -> None:
    """Sleep; raise SystemExit if a stop signal has arrived."""
    if _signals:
        raise SystemExit(exit_code(_signals[0]))
    time.sleep(seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``condition`` is true. False if it is not within ``seconds``."""
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end_s:
            return False
        pause(0.1)
    return True


def answers(host: str, port: int) -> bool:
    """Whether connecting to ``host`` succeeds."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def wait_for_head(head_ip: str, port: int) -> None:
    if not wait_until(partial(answers, head_ip, port), wait_s := number("HEAD_WAIT_S")):
        raise PlatformError(
            f"HEAD_IP = {head_ip} did not answer on port {port} within {wait_s} s. Start node 0 first, check the "
            "address and the firewall, or set HEAD_WAIT_S."
        )


def lock(folder: Path, name: str = ".lock") -> IO[str]:
    """Lock ``folder`` until this process and all that inherit the file descriptor have exited.

    Waits up to LOCK_WAIT_S for another process to release it. Raises ConfigError.
    """
    wait_s, announced = number("LOCK_WAIT_S"), False
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return lock_run(folder, name=name)
        except ConfigError as error:
            if time.monotonic() >= end_s:
                raise
            if not announced:
                say(f"note: {str(error).partition('.')[0]}; waiting up to {wait_s} s for it to end")
            announced = True
            pause(0.2)


# Processes


class Group:
    """A process in a new session and process group, including everything that it starts."""

    def __init__(self, command: Sequence[object], locks: Sequence[IO[str]], output: IO[bytes] | None = None) -> None:
        self.leader = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[file.fileno() for file in locks],
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509  this process has one thread
        )

    def signal(self, how: int) -> bool:
        """Send signal ``how`` to the group. False if the group has no process left."""
        self.leader.poll()  # reap the leader: a zombie would count as a process
        try:
            os.killpg(self.leader.pid, how)
        except OSError:
            return False
        return True

    def wait(self) -> int:
        """Wait for the leader and return its exit code, as in a shell (128 + signal)."""
        while (code := self.leader.poll()) is None:
            pause(0.1)
        return code if code >= 0 else 128 - code


@dataclass
class Processes:
    """The processes that this command has started."""

    grace_s: float
    run: Group | None = None
    services: list[Group] = field(default_factory=list)
    locks: list[IO[str]] = field(default_factory=list)

    def start_service(self, command: Sequence[object], log: Path) -> Group:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.services.append(Group(command, self.locks, output))
        return self.services[-1]

    def require(self, command: Sequence[object]) -> None:
        """Run a command; raise SystemExit with its exit code if it fails."""
        self.services.append(Group(command, self.locks))
        if code := self.services[-1].wait():
            raise SystemExit(code)
        self.services.pop()

    def supervise(self, command: Sequence[object], before_restart: Callable[[], None] = lambda: None) -> int:
        """Run ``command`` and return its exit code. After a fault, restart it up to RESTARTS times.

        User errors and stop signals do not count as faults.
        """
        restarts, wait_s = number("RESTARTS"), number("RESTART_WAIT_S")
        for restart in range(1, restarts + 2):
            self.run = Group(command, self.locks)
            code = self.run.wait()
            if code in (0, EXIT_USER_ERROR, *map(exit_code, SIGNALS)) or restart > restarts:
                return code
            self.run.signal(signal.SIGKILL)  # in case a killed launcher left processes behind
            say(f"the run failed (exit code {code}); restart {restart} of RESTARTS = {restarts} in {wait_s} s")
            wait_until(lambda: False, wait_s)
            wait_s *= 2
            before_restart()
        raise AssertionError("the last start returns")

    @contextmanager
    def stopped_at_end(self) -> Iterator["Processes"]:
        try:
            yield self
        finally:
            if self.run is not None:
                self._stop_run(self.run)
            for how in SIGNALS:
                signal.signal(how, signal.SIG_IGN)  # stopping the services takes only seconds
            end(self.services, SERVICES_END_S)

    def _stop_run(self, run: Group) -> None:
        """Make the run save and exit within grace_s. Forward another signal, which skips saving."""
        forwarded, end_s = len(_signals), time.monotonic() + self.grace_s + MARGIN_S
        run.leader.terminate()  # only the leader: it needs its child processes for saving
        while run.leader.poll() is None and time.monotonic() < end_s:
            if len(_signals) > forwarded:
                forwarded = len(_signals)
                run.leader.terminate()
            time.sleep(0.1)
        end([run], MARGIN_S)


def end(groups: Sequence[Group], seconds: float) -> None:
    for group in groups:
        group.signal(signal.SIGTERM)
    end_s = time.monotonic() + seconds
    while any(group.signal(0) for group in groups) and time.monotonic() < end_s:
        time.sleep(0.05)
    for group in groups:
        group.signal(signal.SIGKILL)


# The sandbox of this node; read its /health with `curl --unix-socket`


def sandbox_folder(node: Node) -> Path:
    """Return the socket's folder: the same path on all nodes, so that one setting fits all."""
    return Path(os.environ.get("SANDBOX_DIR") or f"/tmp/retool-sandboxes-{os.getuid()}") / node.run.run.name


def sandbox_command(node: Node) -> list[Any]:
    settings: Any = getattr(node.run, "sandbox")  # noqa: B009  only in RL configs
    command = ["bash", "launch/sandbox.sh", "--socket", sandbox_folder(node) / "sandbox.sock"]
    command += ["--min-level", settings.min_level, "--workers", settings.workers]
    command += ["--processes", -(-settings.workers // 16), *(["--python", settings.python] if settings.python else [])]
    command += [word for module in settings.preload for word in ("--preload", module)]
    return [*command, *shlex.split(os.environ.get("SANDBOX_OPTIONS", ""))]


def start_sandbox(node: Node, processes: Processes, command: Sequence[object]) -> None:
    """Start launch/sandbox.sh, which restarts its server. Raises ConfigError, PlatformError."""
    folder = sandbox_folder(node)
    for directory in (folder.parent, folder):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.environ.get("SANDBOX_DIR") and folder.parent.lstat().st_uid != os.getuid():
        raise PlatformError(
            f"{folder.parent} belongs to another user, who could impersonate the sandbox. Set SANDBOX_DIR to a folder "
            "of yours."
        )
    processes.locks.append(lock(folder))  # runs of the same name in different roots share this folder
    path, log = folder / "sandbox.sock", folder / "log"
    path.unlink(missing_ok=True)
    service = processes.start_service(command, log)
    wait_until(lambda: path.is_socket() or service.leader.poll() is not None, 30)
    if not path.is_socket():
        raise PlatformError(f"the sandbox did not start: {_last_line(log).removesuffix('.')}. Its output: {log}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "no output")


# This node's part of the run's Ray cluster


def ray_command(node: Node) -> list[Any]:
    from retool_mcore.verl.ray_cluster import ray_folder_name

    port, devices = number("RAY_PORT"), node.run.cluster.gpus_per_node
    command: list[Any] = [PYTHON, "-m", "ray.scripts.scripts", "start"]
    if node.rank == 0:
        command += ["--head", "--include-dashboard", "false", "--node-ip-address", node.head_ip, "--port", port]
    else:
        command += ["--address", f"{node.head_ip}:{port}"]
        command += ["--node-ip-address", os.environ["NODE_IP"]] if os.environ.get("NODE_IP") else []
    command += ["--temp-dir", ray_folder_name(node.folder, node.rank), "--disable-usage-stats", "--block"]
    if node.run.run.platform == "ascend":
        command += ["--resources", json.dumps({"NPU": devices})]
    else:
        command += ["--num-gpus", devices]
    if node.run.run.platform == "cpu":
        command += ["--num-cpus", CPU_ACTORS]
    return [*command, *shlex.split(os.environ.get("RAY_START_OPTIONS", ""))]


def start_ray(node: Node, processes: Processes, command: Sequence[object], folders: ExitStack) -> Group:
    """Start Ray, wait until it is up, and export RAY_ADDRESS. Raises PlatformError."""
    from retool_mcore.verl.ray_cluster import ray_folder

    port, log = number("RAY_PORT"), _ray_log(node)
    if not ipv4(node.head_ip):
        raise PlatformError(
            f"HEAD_IP = {node.head_ip} has no IPv4 address, but Ray's nodes connect over IPv4. Set HEAD_IP to an IPv4 "
            "address of node 0."
        )
    _share_ray_token(node)
    folders.enter_context(ray_folder(node.folder, node.rank))
    if node.rank != 0:
        wait_for_head(node.head_ip, port)
    elif answers(node.head_ip, port):  # otherwise Ray would retry for most of a minute
        raise PlatformError(
            f"RAY_PORT = {port} of {node.head_ip} is in use. Stop the program that uses it, or set another RAY_PORT on "
            "every node."
        )
    os.environ.pop("RAY_ADDRESS", None)  # `ray start` fails if it is set
    os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # nothing to drain once the run has ended
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  no idle worker per core
    ray = processes.start_service(["env", "PYTHONUNBUFFERED=1", *command], log)
    while "Ray runtime started" not in log.read_text(encoding="utf-8", errors="replace"):
        if ray.leader.poll() is not None:
            reason = _last_line(log).removesuffix(".")
            raise PlatformError(f"Ray did not start on this node: {reason}. Its output: {log}")
        pause(0.2)
    os.environ["RAY_ADDRESS"] = f"{node.head_ip}:{port}"
    return ray


def _ray_log(node: Node) -> Path:
    return node.folder / "logs" / f"ray_node{node.rank}.log"


def _share_ray_token(node: Node) -> None:
    """Set up Ray's token authentication: node 0 writes the token to a file in the run's folder."""
    os.environ["RAY_AUTH_MODE"] = "token"
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = node.folder.absolute() / "ray_token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    if node.rank == 0 and not file.exists():
        draft = file.with_name("ray_token.new")
        draft.touch(mode=0o600)
        draft.write_text(token_hex(32), encoding="ascii")
        draft.replace(file)
    if not wait_until(file.exists, number("HEAD_WAIT_S")):
        raise PlatformError(
            f"{file}, which node 0 writes, is missing on this node. Start node 0 first, or set run.root to a folder "
            "that all nodes share."
        )


def serve(node: Node, processes: Processes, command: Sequence[object], folders: ExitStack) -> int:
    """Serve until node 0 leaves; rejoin up to RESTARTS times if this node's Ray dies.

    Polls node 0's Ray port, which closes seconds after node 0 leaves. Ray notices after a minute.
    """
    head = partial(answers, node.head_ip, number("RAY_PORT"))
    for restarts in range(number("RESTARTS") + 1):
        ray = start_ray(node, processes, command, folders)
        again = f" again, {restarts} of RESTARTS = {number('RESTARTS')}," if restarts else ""
        say(f"node {node.rank} has joined{again} and serves until node 0 leaves")
        while not wait_until(lambda: ray.leader.poll() is not None, 1) or not _stays(head):  # noqa: B023
            if _stays(lambda: not head()):
                say("node 0 has left")
                return 0
        ray.signal(signal.SIGKILL)  # in case its leader left processes behind
        say(f"Ray on this node has ended, while node 0 still runs: {_last_line(_ray_log(node))}")
    return EXIT_RETRYABLE


def _stays(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` stays true for LOST_AFTER_S."""
    return not wait_until(lambda: not condition(), LOST_AFTER_S)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in PROGRAMS:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
