"""The recorded pages say what the schema, the tested templates and the trained models say."""

from pathlib import Path
from types import ModuleType

import pytest

from retool_mcore.model.families import FAMILIES
from retool_mcore.model.rope import NEEDED
from tests.golden import models, reference, templates
from tests.model_parity import HYBRIDS, KINDS, ONE, ROPES, scalings


@pytest.mark.parametrize(
    ("page", "module"), [(reference.README, reference), (templates.FILE, templates), (models.README, models)]
)
def test_a_page_is_made_from_its_list(page: Path, module: ModuleType):
    again = f"the list changed: python -m {module.__name__}, and read the diff"
    assert page.read_text(encoding="utf-8") == module.text(), again


def test_every_family_and_position_that_is_taken_is_compared_with_transformers():
    assert {*KINDS, *HYBRIDS} == FAMILIES.keys()
    assert {rope.split()[0] for rope in ROPES} == NEEDED.keys()
    wanted = {(kind, rope) for kind in (*KINDS, *HYBRIDS) for rope in ("default", *scalings(kind))}
    assert {(case.kind, case.rope) for case in ONE} >= wanted
