"""A short soak test. perf/sandbox_soak.py itself runs the long one, of 50,000 executions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("level", ["namespaces", "landlock", "rlimits"])
def test_a_mix_with_hostile_code_leaks_nothing_and_loses_no_call(level: str, tmp_path: Path):
    command = [sys.executable, "perf/sandbox_soak.py", "--count", "80", "--hostile", "0.1", "--level", level]
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "does not support min_level" in result.stderr:
        pytest.skip(result.stderr[-600:])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
