"""The base class and the number types of every section of a run file."""

from typing import Annotated, Any, TypeGuard, cast

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
LearningRate = Annotated[float, Field(gt=0, le=1)]  # at most 1: an update of Adam changes a weight by about this much
StepInterval = Annotated[int, Field(ge=0)]  # an interval in steps
Fraction = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]  # lower and upper bound, or two numbers of one kind


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """A table of TOML or an object of JSON: text as keys, anything as values."""
    return isinstance(value, dict)


def is_tables(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """A list of tables, such as the turns of a conversation."""
    return isinstance(value, list) and all(map(is_table, cast("list[object]", value)))


class Section(BaseModel):
    """A frozen table of the TOML file; unknown keys and coerced types are errors.

    `retool config --explain` prints a section's docstring and the text under each key.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # TOML has inf and nan; no setting may use them
    )
