"""Patches are records: each fits its target, is still needed, and can be taken back."""

import json
import math
from itertools import groupby
from types import ModuleType

import pytest

from retool_mcore.errors import PlatformError
from retool_mcore.platforms import (
    get_platform,
    patches_mbridge,
    patches_megatron,
    patches_sglang,
    patches_torch,
    patches_verl,
)
from retool_mcore.platforms.patches import Change, ModuleView, Patch

PATCHES = get_platform("cpu").patches()


def tau_patch(target: str = "math.tau", parameters: tuple[str, ...] | None = None, **changed) -> Patch:
    record = {
        "changes": (Change(target, parameters, lambda original: "replaced"),),
        "reason": "tau should point the other way",
        "gain": "nothing",
        "applies_to": "pydantic>=2",
        "remove_when": "the circle turns",
    }
    return Patch(**record | changed)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_patches_are_few_and_listed_by_library(platform: str):
    patches = get_platform(platform).patches()
    libraries = [patch.changes[0].target.partition(".")[0] for patch in patches]
    assert [library for library, _ in groupby(libraries)] == list(dict.fromkeys(libraries))
    assert len(patches) <= 25
    for module in (patches_verl, patches_megatron, patches_mbridge, patches_sglang, patches_torch):
        defined = in_order_of_definition(module)
        assert [patch for patch in patches if patch in defined] == [patch for patch in defined if patch in patches]


def in_order_of_definition(module: ModuleType) -> list[Patch]:
    found: list[Patch] = []
    for value in vars(module).values():
        each = value if isinstance(value, tuple) else (value,)
        found += [patch for patch in each if isinstance(patch, Patch) and patch not in found]
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.title)
def test_every_patch_says_why_and_until_when(patch):
    assert len(patch.reason) > 20 and patch.gain
    assert len(patch.remove_when) > 20
    assert "<" in patch.applies_to or "==" in patch.applies_to, "an open range would patch code nobody has read"


def test_a_patch_is_applied_once_and_can_be_taken_back():
    patch = tau_patch()
    before = math.tau
    patch.apply()
    patch.apply()
    try:
        assert math.tau == "replaced"
        assert patch.applied
    finally:
        patch.revert()
    assert math.tau == before
    assert not patch.applied


def test_a_patch_refuses_a_version_it_was_not_written_for():
    with pytest.raises(PlatformError, match=r"math\.tau was written for pydantic<2, and pydantic 2\S+ is installed"):
        tau_patch(applies_to="pydantic<2").apply()


def test_a_patch_refuses_a_package_that_is_not_installed():
    with pytest.raises(PlatformError, match="no-such-package is not installed"):
        tau_patch(applies_to="no-such-package>=1").apply()


@pytest.mark.parametrize("target", ["math.no_such_number", "no_such_module.value", "math.pi.no_such_part.value"])
def test_a_patch_refuses_a_target_that_moved(target):
    with pytest.raises(PlatformError, match="there is no such attribute any more"):
        tau_patch(target=target).apply()


def test_a_patch_refuses_a_function_that_takes_other_parameters():
    changed = tau_patch("json.JSONDecoder.raw_decode", ("self", "text"))
    with pytest.raises(PlatformError, match=r"patch at json\.\S+ takes self, s, idx, and was read with self, text"):
        changed.apply()
    assert json.loads("[1]") == [1] and not changed.applied
    read = tau_patch("json.JSONDecoder.raw_decode", ("self", "s", "idx"))
    read.apply()
    assert read.applied
    read.revert()


def test_one_change_of_a_patch_can_be_taken_back():
    e, pi = (Change(f"math.{name}", None, lambda original: "replaced") for name in ("e", "pi"))
    before = math.e, math.pi
    patch = tau_patch(changes=(e, pi))
    patch.apply()
    patch.revert("math.pi")
    assert (math.e, math.pi) == ("replaced", before[1]) and not patch.applied
    patch.revert("math.e")
    assert (math.e, math.pi) == before


def test_a_module_view_changes_what_one_file_sees():
    view = ModuleView(math, floor=lambda x: 42)
    assert view.floor(1.5) == 42
    assert view.sqrt(9) == 3
    assert math.floor(1.5) == 1
