# pyright: basic
# The types of jsonschema do not pass pyright's strict mode.
"""Validates tool schemas, and arguments against them. Validation fetches nothing.

It ignores ``pattern``, ``patternProperties`` and ``unevaluatedProperties``: a schema may use
another language's regular expressions, and some inputs keep Python's busy for hours. Patterns are
only hints for the model.
"""

import json
from collections.abc import Generator, Mapping
from typing import Any, cast

import jsonschema
import referencing
from jsonschema.exceptions import relevance
from jsonschema.validators import extend

_MAX_CHARS = 500  # of a validator's message


class SchemaRefused(ValueError):
    """The schema cannot be used; the message tells the user why."""


def check(schema: Any) -> None:
    """Raise SchemaRefused if ``schema`` is not a JSON schema or cannot validate arguments."""
    try:
        json.dumps(schema)
        no_formats = jsonschema.FormatChecker(())  # patterns may use another language's regex syntax
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=no_formats)
        _first_error(schema, {})
    except RecursionError as error:
        raise SchemaRefused("it refers to itself, and checking the arguments {} never ends") from error
    except Exception as error:
        raise SchemaRefused(str(getattr(error, "message", error))[:_MAX_CHARS]) from error


def complaint(name: str, schema: Mapping[str, Any], arguments: Any) -> str | None:
    """The error message if ``arguments`` violate the ``schema`` of tool ``name``, else None."""
    try:
        first = _first_error(schema, arguments)
    except Exception as error:  # noqa: BLE001  a schema must not crash the loop
        return f"arguments of {name} cannot be checked: {str(error)[:_MAX_CHARS]}"
    if first is None:
        return None
    at = "".join(f"[{part!r}]" for part in first.absolute_path)
    return f"arguments{at} of {name}: {first.message[:_MAX_CHARS]}"


def _first_error(schema: Mapping[str, Any], arguments: Any) -> Any:
    """The most relevant error, or None. Raises any exception of the validator."""
    plain = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    # An empty registry: the validator raises for a reference that leads out of the schema.
    validator: Any = _Validator(plain, registry=cast("Any", referencing.Registry()))
    return min(validator.iter_errors(arguments), key=relevance, default=None)


def _ignored(validator: Any, value: Any, instance: Any, schema: Any) -> Generator[Any, None, None]:
    yield from ()


def _additional(validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]) -> Generator[Any, None, None]:
    """Skip additionalProperties if the schema has patternProperties, which may allow the key."""
    if "patternProperties" not in schema:
        yield from (
            jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)
            or ()
        )


_Validator: Any = extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": _ignored,
        "patternProperties": _ignored,
        "unevaluatedProperties": _ignored,  # evaluates the patterns of patternProperties
        "additionalProperties": _additional,
    },
)
