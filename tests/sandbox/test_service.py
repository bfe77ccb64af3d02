"""The service of a node as its operator sees it: health, metrics, the end, and who gives way."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.server.app import create_app
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import CgroupTree, remove_stale
from tests.sandbox.sandbox_helpers import ROOT, children_of, processes_named, start


def until(condition: Callable[[], object], limit_s: float = 300) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


async def test_dead_zygotes_are_logged_and_counted(caplog: pytest.LogCaptureFixture):
    others = children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote")  # of sandboxes that tests share
    async with LocalSandbox(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1) as sandbox:
        transport = httpx.ASGITransport(create_app(sandbox))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as http:
            for pid in set(children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote")).difference(others):
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                while sandbox.num_zygote_deaths < 2:
                    await asyncio.sleep(0.02)
            assert (await sandbox.execute("6 * 7")).stdout == "42\n"
            assert (await http.get("/health")).json()["zygote_deaths"] == 2
    assert caplog.text.count("the zygote died, in") == 2  # and closing is no death


async def test_health_is_about_executions_and_comes_back(monkeypatch: pytest.MonkeyPatch):
    async with LocalSandbox(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1, attempts=1) as sandbox:
        transport = httpx.ASGITransport(create_app(sandbox))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as http:
            assert (await http.get("/health")).status_code == 200

            async def refuse(*_: object, **__: object) -> object:
                raise SandboxUnavailable("no process can be had")

            with monkeypatch.context() as broken:
                broken.setattr(sandbox._light[0], "spawn", refuse)  # pyright: ignore[reportPrivateUsage]
                for _ in range(3):
                    answer = await http.post("/run_code", json={"code": "1", "language": "python"})
                    assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
                answer = await http.get("/health")
                body = answer.json()
                assert (answer.status_code, body["status"], body["reason"]) == (503, "failing", "no process can be had")
            assert (await http.get("/health")).status_code == 200


NAME = f"rt-drain-{os.getpid() % 10_000}"


def sleeper(seconds: float) -> str:
    return f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{NAME}', 0, 0, 0); time.sleep({seconds}); print(7)"


def test_a_server_that_is_stopped_waits_for_calls_only_so_long():
    server, url = start("--port", "0", "--workers", "2", "--drain-s", "2")
    calls = [
        subprocess.Popen(
            [sys.executable, "-c", f"import httpx; print(httpx.post('{url}/run_code', timeout=300, json={{'language': "
             f"'python', 'run_timeout': 60, 'code': {sleeper(seconds)!r}}}).text)"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for seconds in (1.5, 50)
    ]  # fmt: skip
    until(lambda: len(processes_named(NAME)) == 2)
    server.terminate()
    stopped_at = time.monotonic()
    server.communicate(timeout=300)
    assert time.monotonic() - stopped_at < 8
    short, long = (call.communicate(timeout=300)[0] for call in calls)
    assert '"stdout":"7\\n"' in short
    assert "Success" not in long


async def test_executions_give_way_to_the_trainer():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        result = await sandbox.execute("import os; print(os.getpriority(os.PRIO_PROCESS, 0))")
        assert result.stdout == "5\n"
        for pid in children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote"):
            assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
            if (autogroup := Path(f"/proc/{pid}/autogroup")).exists():
                assert autogroup.read_text().endswith("nice 5\n")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "the trainer itself does not"


@pytest.mark.parametrize("has_cpu", [True, False])
def test_all_executions_together_have_a_small_weight_where_the_cgroup_has_one(tmp_path: Path, has_cpu: bool):
    for name in ["cgroup.subtree_control", *(["cpu.weight"] if has_cpu else [])]:
        (tmp_path / name).write_text("100")
    CgroupTree(tmp_path, 2)._usable()
    assert (tmp_path / "cpu.weight").exists() == has_cpu
    if has_cpu:
        assert (tmp_path / "cpu.weight").read_text() == "10"


# ------------------------------------------------------------ several processes


def value(url: str, name: str) -> float:
    lines = [line for line in httpx.get(f"{url}/metrics", timeout=300).text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def post(url: str, code: str) -> str:
    answer = httpx.post(f"{url}/run_code", json={"code": code, "language": "python"}, timeout=300)
    return str(answer.json()["run_result"]["stdout"])


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_two_processes_share_an_address_and_are_replaced(blow: signal.Signals):
    server, url = start("--port", "0", "--workers", "2", "--processes", "2", "--drain-s", "1")
    try:
        assert {post(url, "print(6 * 7)") for _ in range(20)} == {"42\n"}
        assert value(url, 'retool_sandbox_executions_total{status="finished"}') == 20
        pids = children_of(server.pid, "spawn_main")
        assert len(pids) == 2
        os.kill(pids[0], blow)
        until(lambda: post(url, "print(6 * 7)") == "42\n", limit_s=60)  # the other process serves
        until(lambda: len(set(children_of(server.pid, "spawn_main")) - set(pids)) == 1, limit_s=120)
        assert value(url, "retool_sandbox_executions_total") == 21  # the dead ones' counts stay
        pids = children_of(server.pid, "spawn_main")
    finally:
        server.terminate()
        server.communicate(timeout=300)
    assert server.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_processes_end_with_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server, url = start("--port", "0", "--workers", "2", "--processes", "2")
    assert post(url, "print(6 * 7)") == "42\n"
    assert not remove_stale(tmp_path, young_s=0)  # those in use stay
    pids = children_of(server.pid, "spawn_main")
    server.kill()
    server.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/ping")
    assert remove_stale(tmp_path, young_s=0) and not list(tmp_path.iterdir())  # its metrics, too


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2", "--processes", "3"], "processes = 3 with workers = 2"),
        (["--workers", "2", "--processes", "2", "--sessions", "4"], "a session lives in one process"),
        (["--workers", "2", "--processes", "2", "--python", "/nowhere/python"], "python' cannot be started"),
    ],
)
def test_processes_that_cannot_be_had_are_told_once(options: list[str], message: str):
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", "0", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr
