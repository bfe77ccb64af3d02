# pyright: basic
# jsonschema has no types that the strict mode would take.
"""Checks the schemas of tools, which may come from strangers, and checks arguments against them.

Nothing is fetched. ``pattern``, ``patternProperties`` and ``unevaluatedProperties`` are ignored:
some texts keep Python's regular expressions busy for hours, so only the model reads patterns.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any, cast

import jsonschema
import referencing
from jsonschema.exceptions import relevance
from jsonschema.validators import extend

_TOLD_CHARS = 500
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaRefused(ValueError):
    """Why a schema cannot be used, in words for the user."""


def check(schema: Any) -> None:
    """Raise SchemaRefused if this is no JSON schema, or if arguments cannot be checked by it."""
    try:
        json.dumps(schema)
    except (RecursionError, TypeError, ValueError) as error:
        raise SchemaRefused(f"it is no JSON: {error}") from error
    for key, target in _references(schema):
        if key != "$ref" or not (target == "#" or target.startswith("#/")):
            raise SchemaRefused(
                f"{json.dumps(key)}: {json.dumps(target)[:200]} leads out of the schema; nothing is fetched: refer by "
                "#/$defs/NAME"
            )
    try:
        no_formats = jsonschema.FormatChecker(())  # a pattern may be of another language than Python
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=no_formats)
    except (AttributeError, TypeError, ValueError, RecursionError, jsonschema.SchemaError) as error:
        raise SchemaRefused(str(getattr(error, "message", error))[:_TOLD_CHARS]) from error
    try:
        _first_error(schema, {})
    except RecursionError as error:
        raise SchemaRefused("it refers to itself, and checking the arguments {} never ends") from error
    except Exception as error:
        raise SchemaRefused(f"the arguments {{}} cannot be checked: {str(error)[:_TOLD_CHARS]}") from error


def complaint(name: str, schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Why ``arguments`` do not fit the ``schema`` of tool ``name``; None where they do."""
    try:
        first = _first_error(schema, arguments)
    except RecursionError:
        return f"arguments of {name} are nested too deeply to check: make them smaller"
    except Exception as error:  # noqa: BLE001  nothing of a schema may escape into the loop
        return f"arguments of {name} cannot be checked: {str(error)[:_TOLD_CHARS]}"
    if first is None:
        return None
    at = "".join(f"[{part!r}]" for part in first.absolute_path)
    return f"arguments{at} of {name}: {first.message[:_TOLD_CHARS]}"


def _first_error(schema: Mapping[str, Any], arguments: Any) -> Any:
    """The most relevant error, or None. Raises whatever the validator raises."""
    plain = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    validator: Any = _WithoutPatterns(plain, registry=cast("Any", referencing.Registry()))
    return min(validator.iter_errors(arguments), key=relevance, default=None)


def _references(schema: Any) -> Iterator[tuple[str, str]]:
    """Every reference in a schema; a property may have that name, and its value is no text then."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield from ((key, each[key]) for key in _REFERENCES if isinstance(each.get(key), str))
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Generator[Any]:
    yield from ()


def _additional(validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]) -> Generator[Any]:
    """A key may match a pattern, and nothing is additional then."""
    if "patternProperties" not in schema:
        yield from jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](
            validator, allowed, instance, schema
        )


_WithoutPatterns: Any = extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": _unchecked,
        "patternProperties": _unchecked,
        "additionalProperties": _additional,
        "unevaluatedProperties": _unchecked,  # it matches the patterns of patternProperties
    },
)
