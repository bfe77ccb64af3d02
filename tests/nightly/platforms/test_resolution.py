"""Every extra can be installed: uv resolves it for Python 3.12, without installing it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from retool_mcore.platforms.patches import VERSIONS, requirement

ROOT = Path(__file__).parents[3]
CUDA_PINS = ROOT / "retool_mcore" / "platforms" / "cuda" / "constraints.txt"
ASCEND_SET, OVERRIDES = ROOT / "ascend" / "requirements.txt", ROOT / "ascend" / "overrides.txt"
MACHINES = {"cpu": "x86_64-manylinux_2_28", "cuda": "x86_64-manylinux_2_34", "ascend": "aarch64-manylinux_2_34"}
PYTHON = "3.12"
NO_INDEX = ("Failed to fetch", "error sending request", "dns error", "No such file or directory (os error 2)")


def resolved(extra: str, *options: str | Path) -> dict[str, str]:
    """Package -> version, or skips the test where no index is reached."""
    uv = Path(sys.executable).parent / "uv"
    words = [uv, "pip", "compile", ROOT / "pyproject.toml", "--extra", extra, "--python-version", PYTHON]
    words += ["--python-platform", MACHINES[extra], "--no-python-downloads", "--no-header", "--no-annotate", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)
    if done.returncode and any(words in done.stderr for words in NO_INDEX):
        pytest.skip(f"no package index is reached from here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return versions(done.stdout)


def versions(text: str) -> dict[str, str]:
    """Package -> version of lines such as ``numpy==2.4.6  # reason``."""
    pins = [Requirement(line.partition("#")[0]) for line in text.splitlines() if "==" in line.partition("#")[0]]
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}


@pytest.mark.parametrize("extra", sorted(MACHINES))
def test_an_extra_resolves_to_versions_that_patches_and_seams_take(extra: str):
    found = resolved(extra)
    taken = {name: Requirement(requirement(name)).specifier for name in VERSIONS}
    wrong = {name: version for name, version in found.items() if name in taken and not taken[name].contains(version)}
    assert wrong == {}
    assert {"verl", "megatron-core", "nvidia-modelopt", "ray", "torch"} <= found.keys()


def test_the_cuda_set_is_whole_and_what_pyproject_allows():
    pins = versions(CUDA_PINS.read_text(encoding="utf-8"))
    found = resolved("cuda", "--constraint", CUDA_PINS)
    assert found == {name: pins.get(name) for name in found}
    assert pins["sglang"] == "0.5.14" and pins["torch"] == "2.11.0"


# What of the set is on no index that pip reaches by itself, and what each asks for: MindSpeed's
# requirements.txt at core_r0.18.0, as far as versions matter, and triton-ascend's, which asks for
# nothing.
NOT_ON_THE_INDEX = {"mindspeed": ("0.12.1", ["numpy<=1.26.0", "transformers>=4.43.2"]), "triton-ascend": ("3.2.2", [])}


def wheel_of(folder: Path, name: str, version: str, requires: list[str]) -> None:
    """A wheel with that name and what it asks for, and no code."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def test_the_ascend_set_resolves_with_its_overrides(tmp_path: Path):
    """With this package's extra, and stand-ins for what is on no index."""
    for name, (version, requires) in NOT_ON_THE_INDEX.items():
        wheel_of(tmp_path, name, version, requires)
    found = resolved("ascend", ASCEND_SET, "--find-links", tmp_path, "--override", OVERRIDES)
    pins = versions(ASCEND_SET.read_text(encoding="utf-8"))
    assert pins.keys() >= NOT_ON_THE_INDEX.keys()
    assert {name: found[name] for name in pins} == pins
    assert Requirement("numpy>=2.0,<2.5").specifier.contains(found["numpy"]), "numba 0.65 does not import with 2.5"
    assert "triton" not in found, "it has the module of triton-ascend"
