"""`retool preflight` as a command: findings, exit codes, the sandbox."""

import sys
from pathlib import Path

import pytest

from retool_mcore.config import load_run
from retool_mcore.preflight import inputs
from retool_mcore.preflight.findings import Finding
from tests import forked
from tests.unit.preflight.test_preflight import RL, good, judged, levels, settings


def test_errors_are_lines_and_the_exit_code(task: Path):
    wrong = settings(task, "model.path=runs/absent", 'validation.files=["absent.parquet"]')
    done = forked.run("retool_mcore", "preflight", RL, *wrong)
    assert done.returncode == 2
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert any("runs/absent" in line for line in errors) and any("absent.parquet" in line for line in errors)
    assert "Traceback" not in done.stderr


def test_tools_are_offered_or_one_error(task: Path):
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    server = Path(__file__).parents[1] / "unit" / "rollout" / "mcp_server.py"

    def look(tool: str) -> list[Finding]:
        wanted = f'rollout.mcp={{own={{command="{sys.executable}", args=["{server}"], tools=["{tool}"]}}}}'
        run = load_run(str(RL), settings(task, wanted))
        return [
            *judged("tools", lambda: inputs.tools(run)),
            *judged("tokenizer", lambda: inputs.tokenizer(run)),
            *judged("data", lambda: inputs.data(run, all_rows=True, render=True)),
        ]

    found = look("count")
    assert set(levels(found)) == {"ok", "note"}
    assert found[0].text == "the model may call code_interpreter, count"
    found = look("absent")
    assert levels(found) == ["error", "ok", "warning", "ok"]
    assert 'rollout.mcp.own.tools has "absent"' in found[0].text and "absent" not in found[2].text


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
