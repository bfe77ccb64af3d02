"""A step is compared where a file that it uses differs."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.perf.modules import interleave


@pytest.mark.parametrize(
    ("changed", "alike"),
    [
        ("retool_mcore/step.py", False),
        ("pyproject.toml", False),
        ("perf/README.md", True),
        ("tests/test_step.py", True),
    ],
)
def test_a_step_is_compared_where_a_file_that_it_is_made_of_differs(tmp_path: Path, changed: str, alike: bool):
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("retool_mcore/step.py", "pyproject.toml", "perf/README.md", "tests/test_step.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("as it was\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (tmp_path / changed).write_text("other\n")
    assert interleave.has_same_step(tmp_path, "HEAD") == alike
    git("commit", "--quiet", "-a", "-m", "second")
    assert interleave.has_same_step(tmp_path, "HEAD~1") == alike
    assert not interleave.has_same_step(tmp_path, "HEAD~2"), "what is no commit is told by what comes next"
