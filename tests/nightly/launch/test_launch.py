"""The launch scripts: short, a dry run anywhere, one clear error, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from launch import nodes
from retool_mcore.errors import PlatformError
from tests.e2e.commands import MARK, marked_processes
from tests.nightly.launch.scripts import RL_ONE, Scripts

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted([*(ROOT / "launch").glob("*_*x*.sh"), *(ROOT / "ascend").glob("*.sh")])


def run(script: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    # TORCHDYNAMO_: platform cpu has set it in this process, and Ascend refuses it.
    foreign = ("SLURM_", "RETOOL_", "VERL_", "TORCHDYNAMO_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return subprocess.run(
        ["bash", str(script), *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
        env={**clean, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_dry_run_starts_nothing_and_has_the_settings(script: Path, tmp_path: Path):
    done = run(script, f"run.root={tmp_path}", "train.steps=7", "--dry-run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Nothing was started" in done.stdout
    assert "total_training_steps: " in done.stdout and " -> 7\n" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_head_that_does_not_answer_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEAD_WAIT_S", "1")
    with pytest.raises(PlatformError, match=r"HEAD_IP = 127.0.0.1 did not answer on port 1 within 1 s"):
        nodes.wait_for_head("127.0.0.1", 1)
    assert nodes.DEFAULTS["HEAD_WAIT_S"] <= 30


@pytest.mark.parametrize("ending", ["done", "failure", signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_what_a_script_started_ends_with_it(scripts: Scripts, ending: str | signal.Signals):
    mark = uuid.uuid4().hex
    last = {"done": "exit 0", "failure": "exit 1"}.get(str(ending), "wait")
    scripts.replace("run", f"sleep 61 & {last}")  # a child of a child, as Ray has
    child = scripts.start(RL_ONE, **{MARK: mark})
    if isinstance(ending, signal.Signals):
        scripts.until(lambda: "sleep 61" in marked(mark), "it runs")
        child.send_signal(ending)
    code = child.wait(timeout=300)
    user = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGKILL: -9}
    assert code == {"done": 0, "failure": 1, **user}[ending]
    # SIGKILL leaves no time to stop a group: its leader gets SIGTERM from the kernel, and Ray's
    # passes it on.
    left = {"sleep 61"} if ending is signal.SIGKILL else set[str]()
    scripts.until(lambda: not marked(mark) - left, "everything has ended", 20)


@pytest.mark.parametrize(("signals", "saved"), [(1, "saved\n"), (2, "at once\n")])
def test_a_run_saves_with_all_that_it_has_started_unless_the_script_gets_two_signals(
    scripts: Scripts, signals: int, saved: str
):
    """As Ray's daemons, which must live until the driver has saved."""
    log, mark = scripts.folder / "saved", uuid.uuid4().hex
    scripts.replace(
        "run",
        f'asked() {{ [ -z "$first" ] || {{ echo at once >>{log}; exit 143; }}; first=1; }}\n'
        f"trap asked TERM; sleep 62 & daemon=$!; echo up >{log}.up\n"
        'while [ -z "$first" ]; do sleep 0.1; done\n'
        f"for _ in $(seq 30); do sleep 0.1; done; kill -0 $daemon && echo saved >>{log}; exit 143",
    )
    script = scripts.start(RL_ONE, **{MARK: mark})
    scripts.until(Path(f"{log}.up").exists, "it runs")
    for _ in range(signals):
        script.terminate()
        time.sleep(1.0)
    assert script.wait(timeout=300) == 143
    assert log.read_text() == saved
    assert not marked(mark)


def marked(mark: str) -> set[str]:
    """Command lines of the live processes that carry the mark."""
    return set(marked_processes(mark).values())


def test_a_sandbox_that_dies_is_started_again_at_its_address(tmp_path: Path):
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = ["bash", "launch/sandbox.sh", "--port", "0", "--min-level", "rlimits", "--workers", "1"]
    script = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None
        url = script.stdout.readline().strip()
        first = servers_below(script.pid)
        os.kill(first[0], signal.SIGKILL)
        end_s = time.monotonic() + 300
        while not (again := servers_below(script.pid)) or again == first:
            assert time.monotonic() < end_s
            time.sleep(0.1)
        ping = [sys.executable, "-m", "retool_mcore.sandbox", "ping", url]
        done = subprocess.run(ping, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    finally:
        script.terminate()
        _, stderr = script.communicate(timeout=300)
    assert script.returncode == 143
    assert "the sandbox exited with code 137 and will restart in 1 s" in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in again)
    killed_ones = "retool-sandbox-"
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(killed_ones)] == []


def servers_below(root: int) -> list[int]:
    """Pids of the sandbox servers that a script started, not those of their zygotes."""
    found: list[int] = []
    for task in Path(f"/proc/{root}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] if command[1:4] == [b"-m", b"retool_mcore.sandbox", b"serve"] else servers_below(pid)
    return found


@pytest.mark.parametrize(
    ("toolkit", "folder"),
    [
        ("cann-9.1.0/set_env.sh", "ascend-toolkit/latest/"),
        ("cann-9.1.0/set_env.sh", "cann"),
        ("ascend-toolkit/set_env.sh", "ascend-toolkit/8.5.1"),
    ],
)
def test_the_scripts_of_cann_8_and_9_are_found_also_through_links(toolkit: str, folder: str, tmp_path: Path):
    """`latest` links to a folder outside of ascend-toolkit, which has CANN 9's script."""
    for path in ("cann-9.1.0", "ascend-toolkit/8.5.1", "nnal/atb"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "cann").symlink_to("cann-9.1.0")
    (tmp_path / "ascend-toolkit" / "latest").symlink_to("../cann-9.1.0")
    for name in (toolkit, "nnal/atb/set_env.sh"):
        (tmp_path / name).write_text(f"[ -z $NOT_SET_BY_ANYBODY ] && echo {name}\n")
    launcher = tmp_path / "launcher.sh"
    launcher.write_text(f"set -euo pipefail\nsource {ROOT}/launch/env_a2.sh\n")
    done = run(launcher, ASCEND_HOME_PATH=f"{tmp_path}/{folder}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines() == [toolkit, "nnal/atb/set_env.sh"]
