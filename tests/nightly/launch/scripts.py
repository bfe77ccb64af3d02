"""Launch scripts with a stand-in for Python: launch/nodes.py is real, and no engine starts."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]
RL_ONE, RL, SFT = "launch/rl_h200x8.sh", "launch/rl_h100x16.sh", "launch/sft_h200x8.sh"


class Scripts:
    """Starts launch scripts; ``folder`` has their runs, sandboxes, logs and what commands do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "one"
        self._started: list[subprocess.Popen[bytes]] = []

    def replace(self, command: str, what: str) -> None:
        """Replace a command of fake_python.sh by this shell code."""
        (self.folder / command).write_text(what + "\n", encoding="utf-8")

    def start(self, script: str, name: str = "log", **env: str) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RETOOL_", "RAY_"))}
        config = "configs/sft_tiny_cpu.toml" if script == SFT else "configs/rl_tiny_cpu.toml"
        root, nodes = env.get("FAKE_ROOT", self.folder / "runs"), env.get("FAKE_NODES", "1")
        words = [f"run.root={root}", "run.name=one", f"cluster.nodes={nodes}", "cluster.gpus_per_node=1"]
        python = str(ROOT / "tests/nightly/launch/fake_python.sh")
        own = {"CONFIG": config, "PYTHON": python, "REAL_PYTHON": sys.executable,
               "FAKE": str(self.folder), "SANDBOX_DIR": str(self.folder / "sandbox"), "TMPDIR": str(self.folder),
               "HEAD_IP": "127.0.0.1", "RAY_AUTH_TOKEN": "one" * 16, "LOCK_WAIT_S": "0",
               "RESTART_WAIT_S": "0"}  # fmt: skip
        with (self.folder / name).open("ab") as log:
            child = subprocess.Popen(
                # What a shell starts in its background ignores SIGINT: pytest may be there.
                ["env", "--default-signal=INT", "bash", script, *words],
                cwd=ROOT,
                env={**inherited, "PYTHONPATH": str(ROOT), **own, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(child)
        return child

    def calls(self) -> list[str]:
        """The names of the commands that were called, in their order."""
        file = self.folder / "calls"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def output(self, name: str = "log") -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 300) -> None:
        end_s = time.monotonic() + timeout_s
        while not condition():
            logs = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.folder.iterdir() if path.is_file())
            assert time.monotonic() < end_s, f"after {timeout_s} s still not: {what}\n{logs}"
            time.sleep(0.05)

    def stop(self) -> None:
        for child in self._started:
            child.terminate()
        for child in self._started:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=300)
            child.kill()
