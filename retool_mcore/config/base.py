"""The base class and the number types of every section of a run file."""

from __future__ import annotations

from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Every = Annotated[int, Field(ge=0)]  # interval in steps; the last step always counts; 0: never
Fraction = Annotated[float, Field(ge=0, le=1)]


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """A table of TOML or an object of JSON: text as keys, anything as values."""
    return isinstance(value, dict)


class Section(BaseModel):
    """A frozen table of the TOML file; unknown keys and coerced types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
