"""Patches apply once and refuse other code; versions agree everywhere."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from retool_mcore.errors import PlatformError
from retool_mcore.platforms import cpu, cuda, get_platform
from retool_mcore.platforms.patches import VERSIONS, Change, Patch, requirement
from retool_mcore.verl.private_names import SEAMS


def patch_of(target: str, parameters: tuple[str, ...] | None = None, applies_to: str = "pydantic>=2") -> Patch:
    change = Change(target, parameters, lambda original: "replaced")
    return Patch(changes=(change,), reason="", gain="", applies_to=applies_to, remove_when="")


def test_a_patch_is_applied_once_and_can_be_reverted():
    original = json.JSONDecoder.raw_decode
    patch = patch_of("json.JSONDecoder.raw_decode", ("self", "s", "idx"))
    patch.apply()
    patch.apply()
    try:
        assert patch.applied and json.JSONDecoder.raw_decode == "replaced"
    finally:
        patch.revert()
    assert json.JSONDecoder.raw_decode is original and not patch.applied


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (patch_of("json.JSONDecoder.raw_decode", ("self", "text")), r"parameters self, text, but the .* self, s, idx"),
        (patch_of("math.tau", applies_to="pydantic<2"), r"math\.tau was written for pydantic<2, but pydantic 2\S+ is"),
        (patch_of("math.tau", applies_to="no-such-package>=2"), "needs no-such-package>=2, but no-such-package is not"),
        (patch_of("math.no_such_number"), "which no longer has that attribute"),
        (patch_of("no_such_module.value"), "which no longer has that attribute"),
    ],
)
def test_a_patch_refuses_other_code(patch: Patch, message: str):
    with pytest.raises(PlatformError, match=message):
        patch.apply()
    assert not patch.applied


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend"])
def test_patches_and_seams_take_the_range_of_their_package(name: str):
    platform = get_platform(name)
    records = (*platform.patches(), *platform.seams(), *SEAMS)
    assert records and {record.applies_to for record in records} <= {requirement(package) for package in VERSIONS}


def pins(file: Path) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    return {requirement.name: requirement for requirement in map(Requirement, filter(None, lines))}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the pins are those of platform cpu")
def test_pins_are_what_is_installed_and_those_of_gpus_except_for_torchs_own_builds():
    folder, different = Path(cpu.__file__).parent, {}
    ours, theirs = pins(folder / "constraints.txt"), pins(Path(cuda.__file__).parent / "constraints.txt")
    for name, pin in (ours | pins(folder / "no_deps.txt")).items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed by another Python version or system
        if not pin.specifier.contains(installed, prereleases=True):
            different[str(pin)] = installed
    assert different == {}
    builds = {"torch", "torchvision", "triton"}
    assert {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]} == builds
