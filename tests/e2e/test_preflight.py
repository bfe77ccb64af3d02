"""`retool preflight` as a command: findings, exit codes, the sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.config import load_run
from retool_mcore.preflight import inputs
from tests import forked
from tests.unit.preflight.test_preflight import RL, good, judged, levels, settings


def test_errors_are_lines_and_the_exit_code(task: Path):
    wrong = settings(task, "model.path=runs/absent", 'validation.files=["absent.parquet"]')
    done = forked.run("retool_mcore", "preflight", RL, *wrong)
    assert done.returncode == 2
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert any("runs/absent" in line for line in errors) and any("absent.parquet" in line for line in errors)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting needs root on Linux")
def test_a_containers_64_mib_of_shared_memory_are_told_in_one_line():
    """Docker's default, as a real mount. NCCL would fail in it, and Ray go to the disk."""
    look = (
        "from retool_mcore.platforms import get_platform; from retool_mcore.preflight.machine import shared_memory\n"
        "print(*shared_memory(get_platform('cuda')), sep='\\n')"
    )
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -W ignore -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, sys.executable, look], capture_output=True, text=True, check=False
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"the kernel gives no mount namespace: {done.stderr.strip()}")
    (line,) = done.stdout.splitlines()
    assert line.startswith("warning shared memory") and "0.1 GiB free in /dev/shm, 16.0 recommended" in line
    assert "--shm-size" in line


def test_tools_are_offered_or_one_error(task: Path):
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    server = Path(__file__).parents[1] / "unit" / "rollout" / "mcp_server.py"
    wanted = f'rollout.mcp={{own={{command="{sys.executable}", args=["{server}"], tools=["count"]}}}}'
    run = load_run(str(RL), settings(task, wanted))
    found = [*inputs.tools(run), *inputs.tokenizer(run), *inputs.data(run, all_rows=True, render=True)]
    assert set(levels(found)) == {"ok", "note"}
    assert found[0].text == "the model may call code_interpreter, count"

    run = load_run(str(RL), settings(task, wanted.replace("count", "absent")))
    findings = [
        *judged("tools", lambda: inputs.tools(run)),
        *judged("tokenizer", lambda: inputs.tokenizer(run)),
        *judged("data", lambda: inputs.data(run, all_rows=True, render=True)),
    ]
    assert [(finding.severity, finding.name) for finding in findings] == [
        ("error", "tools"), ("ok", "tokenizer"), ("warning", "data"), ("ok", "data")
    ]  # fmt: skip
    assert 'rollout.mcp.own.tools has "absent"' in findings[0].text and "absent" not in findings[2].text


ELSEWHERE = 'sandbox.where=["http://127.0.0.1:1"]'


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (('sandbox.where=["unix:///nowhere/absent.sock"]',), "absent.sock"),
        (("sandbox.python=/absent/python",), "sandbox.python = '/absent/python' cannot be started"),
        (('sandbox.preload=["absent_module"]',), "cannot import 'absent_module'"),
        (('sandbox.preload=["absent_module"]', ELSEWHERE), "do not apply to the server"),
    ],
)
def test_a_sandbox_that_cannot_be_had_is_an_error(task: Path, settings_: tuple[str, ...], message: str):
    found = judged("sandbox", lambda: inputs.sandbox(good(task, *settings_)))
    assert levels(found) == ["error"] and message in found[0].text
