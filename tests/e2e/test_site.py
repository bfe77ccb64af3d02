"""The pages build as a site without a warning."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.test_pages import ROOT


def test_the_site_is_built_without_a_warning(tmp_path: Path):
    """By mkdocs, where `make docs` has made its environment; CI makes it."""
    mkdocs = ROOT / ".venv-docs/bin/mkdocs"
    if importlib.util.find_spec("mkdocs") is not None:
        command = [sys.executable, "-m", "mkdocs"]
    elif mkdocs.exists():
        command = [str(mkdocs)]
    else:
        pytest.skip("mkdocs is not installed: make docs")
    done = subprocess.run(
        [*command, "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "questions/index.html").exists()
    assert "judge" in (tmp_path / "repository/retool_mcore/reward/index.html").read_text(encoding="utf-8")
