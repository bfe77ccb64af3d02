"""CONTRIBUTING's first change can be made by its steps."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = "_check_min_lr(self) -> Optim:"


def blocks() -> list[str]:
    """The code blocks of the section, each without its indentation in the page."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Your first change\n")[2].partition("\n## ")[0]
    return [each.rstrip() for each in re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.M)]


def ended(tree: Path) -> int:
    """The exit code of the command that the page gives, in a copy of the repository."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_config.py",
        "-k",
        "min_lr_needs",
    ]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(argv, cwd=tree, env=environment, capture_output=True, check=False, timeout=300).returncode


def test_the_first_change_fails_passes_and_fails_again(tmp_path: Path):
    test, command, code, _ = blocks()
    assert command.strip() == ".venv/bin/pytest tests/unit/test_config.py -k min_lr_needs"
    for folder in ("retool_mcore", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/unit").mkdir(parents=True)
    for file in ("tests/unit/test_config.py", "tests/unit/wrong_settings.toml", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    with (tmp_path / "tests/unit/test_config.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{textwrap.dedent(test)}\n")
    assert ended(tmp_path) == 1
    source = tmp_path / "retool_mcore/config/shared.py"
    before, found, after = source.read_text(encoding="utf-8").partition(PLACE)
    body, end, rest = after.partition("        return self\n")
    assert found and end
    source.write_text(f"{before}{found}{body}{code.strip(chr(10))}\n{end}{rest}", encoding="utf-8")
    assert ended(tmp_path) == 0
    source.write_text(
        source.read_text(encoding="utf-8").replace('self.schedule == "constant"', 'self.schedule == "linear"')
    )
    assert ended(tmp_path) == 1
