"""One range of versions for each package: patches, seams and pyproject.toml's extras agree."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from retool_mcore.platforms import get_platform
from retool_mcore.platforms.patches import VERSIONS, requirement
from retool_mcore.verl.seams import SEAMS

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
DECLARED = [(extra, Requirement(line)) for extra, lines in EXTRAS.items() for line in lines]


@pytest.mark.parametrize(
    ("extra", "declared"),
    [pair for pair in DECLARED if pair[1].name in VERSIONS],
    ids=str,
)
def test_an_extra_allows_the_range_or_one_version_of_it(extra: str, declared: Requirement):
    ours = Requirement(requirement(declared.name)).specifier
    pinned = [each.version for each in declared.specifier if each.operator == "=="]
    assert declared.specifier == ours or (pinned and ours.contains(pinned[0])), f"{extra}: {declared}, not {ours}"


def test_every_package_with_a_range_is_in_an_extra():
    assert {declared.name for _, declared in DECLARED} >= VERSIONS.keys()


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend"])
def test_patches_and_seams_take_the_range_of_their_package(name: str):
    platform = get_platform(name)
    records = (*platform.patches(), *platform.seams(), *SEAMS)
    assert records and {record.applies_to for record in records} <= {requirement(package) for package in VERSIONS}
