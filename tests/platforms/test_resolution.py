"""Every extra can be installed: uv resolves it for Python 3.11 and 3.12, without installing it."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from retool_mcore.platforms.versions import VERSIONS, requirement

ROOT = Path(__file__).parents[2]
CUDA_PINS = ROOT / "retool_mcore" / "platforms" / "cuda" / "constraints.txt"
MACHINES = {"cpu": "x86_64-manylinux_2_28", "cuda": "x86_64-manylinux_2_34", "ascend": "aarch64-manylinux_2_34"}
NO_INDEX = ("Failed to fetch", "error sending request", "dns error", "No such file or directory (os error 2)")


def compiled(project: Path, extra: str, python: str, *options: str) -> subprocess.CompletedProcess[str]:
    uv = Path(sys.executable).parent / "uv"
    words = ["pip", "compile", str(project), "--extra", extra, "--python-version", python, "--no-python-downloads"]
    words += ["--python-platform", MACHINES[extra], "--no-header", "--no-annotate", *options]
    return subprocess.run([uv, *words], capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)


def versions(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Package -> version of a resolution; skips the test where no index is reached."""
    if done.returncode and any(words in done.stderr for words in NO_INDEX):
        pytest.skip(f"no package index is reached from here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.partition(";")[0].strip() for line in done.stdout.splitlines() if "==" in line)
    return dict(line.split("==") for line in lines)


@cache
def resolved(extra: str, python: str) -> dict[str, str]:
    return versions(compiled(ROOT / "pyproject.toml", extra, python))


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("extra", sorted(MACHINES))
def test_an_extra_resolves_to_versions_that_patches_and_seams_take(extra: str, python: str):
    found = resolved(extra, python)
    taken = {name: Requirement(requirement(name)).specifier for name in VERSIONS}
    wrong = {name: version for name, version in found.items() if name in taken and not taken[name].contains(version)}
    assert wrong == {}
    assert {"verl", "megatron-core", "mbridge", "ray", "torch"} <= found.keys()


def test_a_range_without_its_upper_bound_is_seen(tmp_path: Path):
    """On Python 3.12 there are versions of megatron-core that mbridge cannot build."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    without = re.sub(r'"megatron-core>=0\.16\.1,<0\.17"', '"megatron-core>=0.16.1"', text)
    assert without != text
    (tmp_path / "pyproject.toml").write_text(without, encoding="utf-8")
    found = versions(compiled(tmp_path / "pyproject.toml", "ascend", "3.12"))
    assert not Requirement(requirement("megatron-core")).specifier.contains(found["megatron-core"])


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_cuda_set_is_whole_and_what_pyproject_allows(python: str):
    pins = {}
    for line in CUDA_PINS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or Marker(str(pin.marker)).evaluate({"python_version": python}):
                pins[pin.name] = str(pin.specifier).removeprefix("==")
    found = versions(compiled(ROOT / "pyproject.toml", "cuda", python, "--constraint", str(CUDA_PINS)))
    assert found == {name: pins.get(name) for name in found}
    assert pins["sglang"] == "0.5.14" and pins["torch"] == "2.11.0"


def test_ascend_keeps_the_torch_of_its_image():
    assert resolved("ascend", "3.11")["torch"] == "2.9.0"
