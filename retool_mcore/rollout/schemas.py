# pyright: basic
# jsonschema has no types that the strict mode would take.
"""Checks the schemas of tools, which may come from strangers, and checks arguments against them.

Nothing is fetched, and a check of arguments takes a bounded number of steps. It ignores
``pattern``, ``patternProperties`` and ``unevaluatedProperties``: some texts keep Python's regular
expressions busy for hours, so only the model reads patterns.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import jsonschema
import referencing
from jsonschema.exceptions import relevance
from jsonschema.validators import extend

MAX_STEPS = 20_000  # keywords that one check may look at
_TOLD_CHARS = 500
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

_steps: ContextVar[list[int]] = ContextVar("steps")


class SchemaRefused(ValueError):
    """Why a schema cannot be used, in words for the user."""


class _TooMuch(Exception):
    """The check took more steps than it may."""


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
    except (_TooMuch, RecursionError) as error:
        raise SchemaRefused("it refers to itself, and checking the arguments {} never ends") from error
    except Exception as error:
        raise SchemaRefused(f"the arguments {{}} cannot be checked: {str(error)[:_TOLD_CHARS]}") from error


def complaint(name: str, schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Why ``arguments`` do not fit the ``schema`` of tool ``name``; None where they do."""
    try:
        first = _first_error(schema, arguments)
    except (_TooMuch, RecursionError):
        return f"arguments of {name} take too long to check: make them smaller"
    except Exception as error:  # noqa: BLE001  nothing of a schema may escape into the loop
        return f"arguments of {name} cannot be checked: {str(error)[:_TOLD_CHARS]}"
    if first is None:
        return None
    at = "".join(f"[{part!r}]" for part in first.absolute_path)
    return f"arguments{at} of {name}: {first.message[:_TOLD_CHARS]}"


def _first_error(schema: Mapping[str, Any], arguments: Any) -> Any:
    """The most relevant error, or None. Raises _TooMuch, and whatever the validator raises."""
    plain = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    validator: Any = _Bounded(plain, registry=cast("Any", referencing.Registry()))
    token = _steps.set([0])
    try:
        return min(validator.iter_errors(arguments), key=relevance, default=None)
    finally:
        _steps.reset(token)


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


_Errors = Generator[Any, None, None]


def _counted(keyword: Callable[..., Any]) -> Callable[..., _Errors]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
        spent = _steps.get()
        spent[0] += 1
        if spent[0] > MAX_STEPS:
            raise _TooMuch
        yield from keyword(validator, value, instance, schema) or ()

    return counted


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    yield from ()


def _additional(validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]) -> _Errors:
    """A key may match a pattern, and nothing is additional then."""
    if "patternProperties" not in schema:
        yield from _KEYWORDS["additionalProperties"](validator, allowed, instance, schema)


def _unique(validator: Any, asked: bool, instance: Any, schema: Any) -> _Errors:
    if asked and isinstance(instance, list):
        texts = [json.dumps(value, sort_keys=True) for value in cast("list[Any]", instance)]
        if len(set(texts)) < len(texts):
            yield jsonschema.ValidationError(f"{str(cast('Any', instance))[:200]} has non-unique elements")


_KEYWORDS: Mapping[str, Any] = jsonschema.Draft202012Validator.VALIDATORS
_OWN = {
    "pattern": _unchecked,
    "patternProperties": _unchecked,
    "additionalProperties": _additional,
    "uniqueItems": _unique,
    "unevaluatedProperties": _unchecked,  # it matches the patterns of patternProperties
}
_Bounded: Any = extend(
    jsonschema.Draft202012Validator, {name: _counted(_OWN.get(name, keyword)) for name, keyword in _KEYWORDS.items()}
)
