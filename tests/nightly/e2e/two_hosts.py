"""Two 'hosts' on one Linux machine: network namespaces on a bridge, each with a private folder
of the sandbox.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.commands import MARK, ROOT

SUBNET = "10.77.13"
INTERFACE = "eth0"
# Two real hosts would not share it. It is this process's own: who removes a folder in another
# namespace takes away what is mounted there.
SANDBOX_DIR = f"/tmp/rt{os.getpid()}s"


def why_not() -> str:
    """Why this machine cannot rehearse; "" when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    done = subprocess.run(["ip", "netns", "add", f"rt{os.getpid()}p"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the kernel gives no network namespace: {done.stderr.strip()}"
    _ip("netns", "del", f"rt{os.getpid()}p")
    return ""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    folder: Path

    def start(self, script: str, words: Sequence[str], env: dict[str, str], mark: str) -> subprocess.Popen[str]:
        """``bash script words...`` on this host; its output goes to ``folder``/log."""
        own = self.folder / "sandbox"
        bind = f"mkdir -p {SANDBOX_DIR} {own} && mount --bind {own} {SANDBOX_DIR}"
        full = {**os.environ, MARK: mark, "PYTHON": sys.executable, "SOCKET_IFNAME": INTERFACE,
                "SANDBOX_DIR": SANDBOX_DIR, "NODE_IP": self.address, "HEAD_IP": f"{SUBNET}.1", **env}  # fmt: skip
        argv = ["ip", "netns", "exec", self.name, "bash", "-c", f'{bind} && exec bash "$@"', "bash", script, *words]
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(argv, cwd=ROOT, env=full, stdout=log, stderr=subprocess.STDOUT, text=True)

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Everything on this host dies at once, as when its power is cut."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for pid in done.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """The hosts ``.1`` and ``.2`` of one network; all of their processes are killed at the end."""
    bridge = f"rtb{os.getpid()}"
    hosts = tuple(Host(f"rt{os.getpid()}{n}", f"{SUBNET}.{i}", folder / n) for i, n in enumerate("ab", start=1))
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{SUBNET}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            host.folder.mkdir(parents=True)
            cable = f"{host.name}v"
            _ip("netns", "add", host.name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", INTERFACE, "netns", host.name)
            _ip("link", "set", cable, "master", bridge, "up")
            for words in (f"addr add {host.address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up",
                          f"route add default via {SUBNET}.254"):  # fmt: skip
                _ip("-n", host.name, *words.split())
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.kill()
            # A namespace outlives this until its last process is gone; its cable does not.
            subprocess.run(["ip", "link", "del", f"{host.name}v"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
        shutil.rmtree(SANDBOX_DIR, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
