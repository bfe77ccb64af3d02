"""The recorded pages of configs/ say what the schema and the tested templates say."""

from tests.golden import templates
from tests.golden.reference import README, text


def test_the_reference_is_that_of_the_schema():
    again = "the keys changed: python -m tests.golden.reference, and read the diff"
    assert README.read_text(encoding="utf-8") == text(), again


def test_the_table_of_templates_is_made_from_the_list_that_is_tested():
    assert templates.FILE.read_text(encoding="utf-8") == templates.text(), "run python -m tests.golden.templates"
