# pyright: basic
# jsonschema has no types that the strict mode would take.
"""Checks the schemas of tools, which may come from strangers, and checks arguments against them.

A schema that refers to an address would make the trainer fetch it, and one that refers to itself
never ends. ``check`` refuses such schemas before training starts. ``complaint`` checks arguments
without the network, in a bounded number of steps. It ignores ``pattern`` and ``patternProperties``,
as some texts keep Python's regular expressions busy for hours: only the model reads them.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import jsonschema
import referencing
from jsonschema.exceptions import relevance
from jsonschema.validators import extend

MAX_SCHEMA_CHARS = 256 << 10
MAX_DEPTH = 48  # of a schema, and of arguments
MAX_STEPS = 20_000  # keywords that one check may look at
_TOLD_CHARS = 500
_REFUSED = ("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$anchor")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")  # look at the same value
_LITERAL = ("const", "enum", "default", "examples")  # hold values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas by name

_steps: ContextVar[list[int]] = ContextVar("steps")


class SchemaRefused(ValueError):
    """Why a schema cannot be used, in words for the user."""


class _TooMuch(Exception):
    """The check took more steps than it may."""


def check(schema: Any) -> None:
    """Raise SchemaRefused if this is no JSON schema, or if checking arguments could have no end."""
    try:
        size = len(json.dumps(schema))
    except (RecursionError, TypeError, ValueError) as error:
        raise SchemaRefused(f"it is no JSON: {error}") from error
    if size > MAX_SCHEMA_CHARS:
        raise SchemaRefused(f"it has {size} characters, and at most {MAX_SCHEMA_CHARS} are taken")
    keywords: set[str] = set()
    for each, depth, is_schema in _parts(schema):
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"it is deeper than {MAX_DEPTH} levels")
        if is_schema and isinstance(each, dict):
            _check_references(cast("dict[str, Any]", each), schema, is_root=each is schema)
            keywords |= cast("dict[str, Any]", each).keys()
    if {"patternProperties", "unevaluatedProperties"} <= keywords:  # the latter matches the patterns of the former
        raise SchemaRefused("it has unevaluatedProperties beside patternProperties: use additionalProperties")
    try:
        no_formats = jsonschema.FormatChecker(())  # a pattern may be of another language than Python
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=no_formats)
    except (AttributeError, TypeError, ValueError, RecursionError, jsonschema.SchemaError) as error:
        raise SchemaRefused(str(getattr(error, "message", error))[:_TOLD_CHARS]) from error
    _refuse_circles(schema)


def complaint(name: str, schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Why ``arguments`` do not fit the ``schema`` of tool ``name``; None where they do."""
    if _depth_above(arguments, MAX_DEPTH):
        return f"arguments of {name} are nested deeper than {MAX_DEPTH} levels"
    plain = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
    validator: Any = _Bounded(plain, registry=cast("Any", referencing.Registry()))
    token = _steps.set([0])
    try:
        first: Any = min(validator.iter_errors(arguments), key=relevance, default=None)
    except (_TooMuch, RecursionError):
        return f"arguments of {name} take too long to check: make them smaller"
    except Exception as error:  # noqa: BLE001  nothing of a schema may escape into the loop
        return f"arguments of {name} cannot be checked: {str(error)[:_TOLD_CHARS]}"
    finally:
        _steps.reset(token)
    if first is None:
        return None
    at = "".join(f"[{part!r}]" for part in first.absolute_path)
    return f"arguments{at} of {name}: {first.message[:_TOLD_CHARS]}"


# ------------------------------------------------------------------- at start


def _parts(schema: Any) -> Iterator[tuple[Any, int, bool]]:
    """Every value in a schema, its depth, and whether it is a schema rather than a table."""
    waiting: list[tuple[Any, int, bool]] = [(schema, 0, True)]
    while waiting:
        each, depth, is_schema = waiting.pop()
        yield each, depth, is_schema
        if isinstance(each, dict):
            for key, value in cast("dict[str, Any]", each).items():
                if not (is_schema and key in _LITERAL):
                    waiting.append((value, depth + 1, not (is_schema and key in _NAMED)))
        elif isinstance(each, list):
            waiting += [(value, depth + 1, True) for value in cast("list[Any]", each)]


def _check_references(schema: dict[str, Any], root: Any, *, is_root: bool) -> None:
    if "$ref" in schema:
        _target(schema["$ref"], root)
    for key in (*_REFUSED, *(() if is_root else ("$id",))):
        if key in schema:
            raise SchemaRefused(f"it has {key}, which is not followed here: refer by #/$defs/NAME")


def _target(ref: Any, root: Any) -> Any:
    """What a local reference leads to."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise SchemaRefused(
            f'"$ref": {json.dumps(ref)[:200]} leads out of the schema; nothing is fetched: inline it under $defs'
        )
    found = root
    for written in ref.split("/")[1:]:
        part = written.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = cast("Any", found)[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(cast("list[Any]", found)):
            found = cast("Any", found)[int(part)]
        else:
            raise SchemaRefused(f'"$ref": {json.dumps(ref)[:200]} leads to nothing in the schema')
    return cast("Any", found)


def _refuse_circles(root: Any) -> None:
    """Refuse a schema that asks about one value by way of itself: it would never end."""
    done, path = set[int](), set[int]()

    def visit(schema: Any) -> None:
        if not isinstance(schema, dict) or id(schema) in done:
            return
        each = cast("dict[str, Any]", schema)
        if id(each) in path:
            raise SchemaRefused("it refers to itself without going deeper into the arguments, which never ends")
        path.add(id(each))
        for key in _IN_PLACE:
            inner = each.get(key)
            values = (
                inner if isinstance(inner, list) else inner.values() if key == "dependentSchemas" and inner else [inner]
            )
            for value in values:
                visit(value)
        if "$ref" in each:
            visit(_target(each["$ref"], root))
        path.discard(id(each))
        done.add(id(each))

    try:
        for each, _, is_schema in _parts(root):
            if is_schema:
                visit(each)
    except RecursionError as error:
        raise SchemaRefused("its references are nested too deeply") from error


# ------------------------------------------------------------------- in bounds

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


def _depth_above(value: Any, most: int) -> bool:
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        if depth > most:
            return True
        inner = cast("Any", each).values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting += [(item, depth + 1) for item in cast("Any", inner)]
    return False


_KEYWORDS: Mapping[str, Any] = jsonschema.Draft202012Validator.VALIDATORS
_OWN = {
    "pattern": _unchecked,
    "patternProperties": _unchecked,
    "additionalProperties": _additional,
    "uniqueItems": _unique,
}
_Bounded: Any = extend(
    jsonschema.Draft202012Validator, {name: _counted(_OWN.get(name, keyword)) for name, keyword in _KEYWORDS.items()}
)
