# pyright: basic
# The types of jsonschema do not pass pyright's strict mode.
"""Validates tool schemas, which may be untrusted, and validates arguments against them.

Validation fetches nothing and takes a bounded number of steps. It ignores ``pattern``,
``patternProperties`` and ``unevaluatedProperties``, because Python's regular expressions take hours
on some inputs. Patterns are only hints for the model.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import jsonschema
import referencing
from jsonschema.exceptions import relevance
from jsonschema.validators import extend

MAX_STEPS = 20_000  # schema keywords that one validation may evaluate
_MAX_CHARS = 500  # of a validator's message
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

_steps: ContextVar[list[int]] = ContextVar("steps")


class SchemaRefused(ValueError):
    """The schema cannot be used. The message states the reason."""


class _TooManySteps(Exception):
    """The validation exceeded MAX_STEPS."""


def check(schema: Any) -> None:
    """Raise SchemaRefused if ``schema`` is not a JSON schema or cannot validate arguments."""
    try:
        json.dumps(schema)
    except (RecursionError, TypeError, ValueError) as error:
        raise SchemaRefused(f"it is not JSON: {error}") from error
    for key, target in _references(schema):
        if key != "$ref" or not (target == "#" or target.startswith("#/")):
            raise SchemaRefused(
                f"{json.dumps(key)}: {json.dumps(target)[:200]} points outside the schema, but nothing is fetched. Use "
                "a reference such as #/$defs/NAME"
            )
    try:
        no_formats = jsonschema.FormatChecker(())  # patterns may use another language's regex syntax
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=no_formats)
    except (AttributeError, TypeError, ValueError, RecursionError, jsonschema.SchemaError) as error:
        raise SchemaRefused(str(getattr(error, "message", error))[:_MAX_CHARS]) from error
    try:
        _first_error(schema, {})
    except (_TooManySteps, RecursionError) as error:
        raise SchemaRefused("it refers to itself, so checking the arguments {} never ends") from error
    except Exception as error:
        raise SchemaRefused(f"the arguments {{}} cannot be checked: {str(error)[:_MAX_CHARS]}") from error


def complaint(name: str, schema: Mapping[str, Any], arguments: Any) -> str | None:
    """The error message if ``arguments`` violate the ``schema`` of tool ``name``, else None."""
    try:
        first = _first_error(schema, arguments)
    except (_TooManySteps, RecursionError):
        return f"arguments of {name} take too long to check. Make them smaller"
    except Exception as error:  # noqa: BLE001  a schema must not crash the loop
        return f"arguments of {name} cannot be checked: {str(error)[:_MAX_CHARS]}"
    if first is None:
        return None
    at = "".join(f"[{part!r}]" for part in first.absolute_path)
    return f"arguments{at} of {name}: {first.message[:_MAX_CHARS]}"


def _first_error(schema: Mapping[str, Any], arguments: Any) -> Any:
    """The most relevant error, or None. Raises _TooManySteps and any exception of the validator."""
    plain = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    validator: Any = _Bounded(plain, registry=cast("Any", referencing.Registry()))
    token = _steps.set([0])
    try:
        return min(validator.iter_errors(arguments), key=relevance, default=None)
    finally:
        _steps.reset(token)


def _references(schema: Any) -> Iterator[tuple[str, str]]:
    """Every (keyword, target) reference in a schema.

    A property may be named "$ref", too; its value is a schema, not a string.
    """
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from ((key, part[key]) for key in _REFERENCES if isinstance(part.get(key), str))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


_Errors = Generator[Any, None, None]


def _counted(keyword: Callable[..., Any]) -> Callable[..., _Errors]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
        spent = _steps.get()
        spent[0] += 1
        if spent[0] > MAX_STEPS:
            raise _TooManySteps
        yield from keyword(validator, value, instance, schema) or ()

    return counted


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    yield from ()


def _additional(validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]) -> _Errors:
    """Skip additionalProperties if the schema has patternProperties, which may allow the key."""
    if "patternProperties" not in schema:
        yield from _KEYWORDS["additionalProperties"](validator, allowed, instance, schema)


def _unique(validator: Any, required: bool, instance: Any, schema: Any) -> _Errors:
    if required and isinstance(instance, list):
        texts = [json.dumps(value, sort_keys=True) for value in cast("list[Any]", instance)]
        if len(set(texts)) < len(texts):
            yield jsonschema.ValidationError(f"{str(cast('Any', instance))[:200]} has non-unique elements")


_KEYWORDS: Mapping[str, Any] = jsonschema.Draft202012Validator.VALIDATORS
_OWN = {
    "pattern": _unchecked,
    "patternProperties": _unchecked,
    "additionalProperties": _additional,
    "uniqueItems": _unique,
    "unevaluatedProperties": _unchecked,  # jsonschema's would evaluate patterns
}
_Bounded: Any = extend(
    jsonschema.Draft202012Validator, {name: _counted(_OWN.get(name, keyword)) for name, keyword in _KEYWORDS.items()}
)
