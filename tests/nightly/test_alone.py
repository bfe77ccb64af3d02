"""The judge and the sandbox are had alone: a wheel, its base dependencies, nothing of the engines.

The environment is bare: it holds the wheel as pip installs it, and of the packages here only those
that the wheel's base dependencies ask for, and what those ask for.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENGINES = ("torch", "verl", "ray", "sglang", "transformers", "megatron")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with our wheel and its base dependencies."""
    directory = tmp_path_factory.mktemp("alone")
    source, wheels, home = directory / "source", directory / "wheels", directory / "venv"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("retool_mcore", "ascend"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=source, check=True, capture_output=True)
    venv.create(home)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    (metadata,) = packages.glob("retool_mcore-*.dist-info")
    installed = importlib.metadata.Distribution.at(metadata)
    for distribution in _needed(installed, set()):
        for file in distribution.files or ():
            if ".." not in file.parts:
                _link(Path(str(distribution.locate_file(file))), packages / file)
    return python


def _needed(of: importlib.metadata.Distribution, known: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """What a distribution needs without extras, and what that needs."""
    for line in of.requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower() not in known:
            known.add(requirement.name.lower())
            distribution = importlib.metadata.distribution(requirement.name)
            yield distribution
            yield from _needed(distribution, known)


def _link(source: Path, target: Path) -> None:
    """The sandbox shows code only the environment, so a symbolic link would be broken."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileExistsError:
        pass
    except OSError:  # on another disk
        shutil.copy(source, target)


def run(python: Path, code: str, tmp_path: Path) -> str:
    """What code prints in the bare environment."""
    done = subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rooms_are_had_without_the_engines_and_their_examples_run_as_printed(bare_python: Path, tmp_path: Path):
    code = (
        "import importlib.util, sys; import retool_mcore.reward, retool_mcore.sandbox\n"
        "from retool_mcore.reward import *; from retool_mcore.sandbox import *\n"
        "assert retool_mcore.__file__.startswith(sys.prefix), retool_mcore.__file__\n"
        f"print([name for name in {ENGINES} if importlib.util.find_spec(name)])"
    )
    assert run(bare_python, code, tmp_path) == "[]\n"
    for room in ("reward", "sandbox"):
        guide = (ROOT / "retool_mcore" / room / "README.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
        printed = re.findall(r"print\(.*\)  # (.*)", example)
        assert printed and run(bare_python, example, tmp_path).splitlines() == printed
