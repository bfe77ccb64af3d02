"""retool_mcore/model/README.md says what the parity tests train."""

from retool_mcore.model.families import FAMILIES
from retool_mcore.model.rope import NEEDED
from tests.golden.models import README, text
from tests.model_parity import KINDS, ONE, ROPES, SAMPLED


def test_the_table_is_that_of_the_tests():
    again = "the models changed: python -m tests.golden.models, and read the diff"
    assert README.read_text(encoding="utf-8") == text(), again


def test_every_family_and_position_that_is_taken_is_compared_with_transformers():
    assert set(KINDS) == FAMILIES.keys()
    assert {rope.split()[0] for rope in ROPES} == NEEDED.keys()
    assert {(case.kind, case.rope) for case in ONE} >= {(kind, rope) for kind in KINDS for rope in SAMPLED}
