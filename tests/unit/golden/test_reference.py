"""Every key of a configuration is explained, and configs/README.md says what the schema says."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from retool_mcore.config import RlConfig, SftConfig
from tests.golden import templates
from tests.golden.reference import README, text


def explanations(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Key -> what is written under it; section -> its docstring."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield f"{prefix}{name}", inner.__doc__
            yield from explanations(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description


@pytest.mark.parametrize("kind", [SftConfig, RlConfig])
def test_every_key_has_an_explanation(kind: type[BaseModel]):
    found = dict(explanations(kind))
    assert len(found) > 40
    assert not [key for key, words in found.items() if len((words or "").strip()) < 10]


def test_the_reference_is_that_of_the_schema():
    again = "the keys changed: python -m tests.golden.reference, and read the diff"
    assert README.read_text(encoding="utf-8") == text(), again


def test_the_table_of_templates_is_made_from_the_list_that_is_tested():
    assert templates.FILE.read_text(encoding="utf-8") == templates.text(), "run python -m tests.golden.templates"
