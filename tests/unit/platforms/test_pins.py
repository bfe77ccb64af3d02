"""The pinned environment is the one the tests run in."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from retool_mcore.platforms import cpu, cuda

FOLDER = Path(cpu.__file__).parent
CUDA_FOLDER = Path(cuda.__file__).parent


def pins(name: str, folder: Path = FOLDER) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in (folder / name).read_text().splitlines()]
    return {requirement.name: requirement for requirement in map(Requirement, filter(None, lines))}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the pins are those of platform cpu")
def test_constraints_are_what_is_installed():
    different = {}
    for name, pin in pins("constraints.txt").items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed by another Python version or system
        if not pin.specifier.contains(installed, prereleases=True):
            different[str(pin)] = installed
    assert different == {}


def test_packages_without_their_dependencies_are_pinned_alike():
    constraints = pins("constraints.txt")
    assert {name: constraints[name].specifier for name in pins("no_deps.txt")} == {
        name: pin.specifier for name, pin in pins("no_deps.txt").items()
    }


def test_constraints_pin_one_version_each():
    assert all(str(pin.specifier).startswith("==") for pin in pins("constraints.txt").values())


def test_the_cpu_set_and_the_cuda_set_share_their_versions():
    """CPU tests run the packages that GPUs get, except for torch's own builds."""
    ours, theirs = pins("constraints.txt"), pins("constraints.txt", CUDA_FOLDER)
    different = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert different == {"torch", "torchvision"}
