"""Patches apply once and refuse other code; versions agree everywhere."""

import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from retool_mcore.errors import PlatformError
from retool_mcore.platforms import (
    cpu,
    cuda,
    get_platform,
)
from retool_mcore.platforms.patches import VERSIONS, Change, Patch, requirement
from retool_mcore.verl.private_names import SEAMS
from tests.scenario import ROOT

PATCHES = get_platform("cpu").patches()
FOLDER = Path(cpu.__file__).parent
CUDA_FOLDER = Path(cuda.__file__).parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
DECLARED = [(extra, Requirement(line)) for extra, lines in EXTRAS.items() for line in lines]


def tau_patch(target: str = "math.tau", parameters: tuple[str, ...] | None = None, **changed) -> Patch:
    record = {
        "changes": (Change(target, parameters, lambda original: "replaced"),),
        "reason": "tau should point the other way",
        "gain": "nothing",
        "applies_to": "pydantic>=2",
        "remove_when": "the circle turns",
    }
    return Patch(**record | changed)


def test_a_patch_is_applied_once_can_be_reverted_and_refuses_other_parameters():
    original = json.JSONDecoder.raw_decode
    changed = tau_patch("json.JSONDecoder.raw_decode", ("self", "text"))
    with pytest.raises(PlatformError, match=r"patch of json\.\S+ was .* self, text, but the .* are self, s, idx"):
        changed.apply()
    assert json.JSONDecoder.raw_decode is original and not changed.applied
    patch = tau_patch("json.JSONDecoder.raw_decode", ("self", "s", "idx"))
    patch.apply()
    patch.apply()
    try:
        assert patch.applied and json.JSONDecoder.raw_decode == "replaced"
    finally:
        patch.revert()
    assert json.JSONDecoder.raw_decode is original and not patch.applied


def test_a_patch_refuses_other_versions():
    with pytest.raises(PlatformError, match=r"math\.tau was written for pydantic<2, but pydantic 2\S+ is installed"):
        tau_patch(applies_to="pydantic<2").apply()
    with pytest.raises(PlatformError, match=r"of math\.tau needs no-such-package>=2, but no-such-package is not ins"):
        tau_patch(applies_to="no-such-package>=2").apply()


@pytest.mark.parametrize("target", ["math.no_such_number", "no_such_module.value"])
def test_a_patch_refuses_a_target_that_moved(target):
    with pytest.raises(PlatformError, match="which no longer has that attribute"):
        tau_patch(target=target).apply()


@pytest.mark.parametrize(
    ("extra", "declared"),
    [pair for pair in DECLARED if pair[1].name in VERSIONS],
    ids=str,
)
def test_an_extra_allows_the_range_or_one_version_of_it(extra: str, declared: Requirement):
    ours = Requirement(requirement(declared.name)).specifier
    pinned = [each.version for each in declared.specifier if each.operator == "=="]
    assert declared.specifier == ours or (pinned and ours.contains(pinned[0])), f"{extra}: {declared}, not {ours}"


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend"])
def test_patches_and_seams_take_the_range_of_their_package(name: str):
    platform = get_platform(name)
    records = (*platform.patches(), *platform.seams(), *SEAMS)
    assert records and {record.applies_to for record in records} <= {requirement(package) for package in VERSIONS}


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


def test_the_cpu_set_and_the_cuda_set_share_their_versions():
    """CPU tests run the packages that GPUs get, except for torch's own builds."""
    ours, theirs = pins("constraints.txt"), pins("constraints.txt", CUDA_FOLDER)
    different = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert different == {"torch", "torchvision"}
