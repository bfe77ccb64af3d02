"""What an import of the package costs, and what the repository must not contain."""

import subprocess
import sys

from tests.unit.test_architecture import ROOT


def test_reading_a_command_line_imports_neither_web_server_nor_engine():
    """Each command pays for it, `--help` too."""
    code = "import sys; from retool_mcore.cli.main import all_commands; all_commands(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"fastapi", "starlette", "uvicorn", "torch", "transformers", "ray", "sympy", "scipy"}
    assert heavy.isdisjoint(done.stdout.split())


def test_no_machine_leaks_into_the_repository():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = ["/" + "work/", "/" + "root/", "bash_" + "jobs"]
    for name in tracked:
        path = ROOT / name
        if path.suffix not in {".parquet", ".png"} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in words if word in text], name
