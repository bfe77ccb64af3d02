"""Reading a command line imports neither a web server nor an engine."""

import subprocess
import sys


def test_reading_a_command_line_imports_neither_web_server_nor_engine():
    """Each command pays for it, `--help` too."""
    code = "import sys; from retool_mcore.cli.main import all_commands; all_commands(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"fastapi", "starlette", "uvicorn", "prometheus_client", "torch", "transformers", "ray", "sympy", "scipy"}
    assert heavy.isdisjoint(done.stdout.split())
