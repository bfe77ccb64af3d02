"""A schema that attacks the trainer is refused at start; every other check is bounded."""

import json
import time
from typing import Any

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.rollout import schemas
from retool_mcore.rollout.tools import check_tool
from tests.unit.rollout.test_tools import Counter


def tool(**schema: Any) -> Counter:
    made = Counter()
    made.parameters = {"type": "object", **schema}
    return made


def complaint(made: Counter, arguments: Any) -> str | None:
    return schemas.complaint(made.name, made.parameters, arguments)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "http://127.0.0.1:1/x"}, "points outside the schema, but nothing is fetched"),
        ({"$ref": "#/$defs/none"}, "cannot be checked: PointerToNowhere"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
        ({"properties": {"n": {"$dynamicRef": "#x"}}}, "points outside the schema"),
        ({"description": "x" * (300 << 10)}, "characters. The limit is"),
    ],
)
def test_a_schema_that_cannot_be_checked_in_bounds_is_refused_at_start(schema: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=rf"{message}.*leave this tool out"):
        check_tool("rollout.mcp.x", tool(**schema))


GOOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "$ref": {}}}},
    "properties": {"id": {"type": "string"}, "node": {"$ref": "#/$defs/node"}},
    "additionalProperties": False,
    "required": ["id"],
}
UNIQUE = {"properties": {"n": {"uniqueItems": True}}}
# Shown to the model and not checked: Python cannot compile JavaScript's \p{L}.
PATTERNS = {
    "properties": {"n": {"type": "string", "pattern": "^[ab]+$"}},
    "patternProperties": {"^\\p{L}+$": {"type": "integer"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "arguments", "message"),
    [
        (GOOD, {"id": "ab-12", "node": {"next": {"next": {}}}}, ""),
        (GOOD, {"id": 12}, "arguments['id'] of count: 12 is not of type 'string'"),
        (GOOD, {}, "arguments of count: 'id' is a required property"),
        (GOOD, {"id": "ab-1", "x": 1}, "Additional properties are not allowed ('x' was unexpected)"),
        (GOOD, {"id": "ab-1", "node": {"next": {"next": 3}}}, "is not of type 'object'"),
        (UNIQUE, {"n": [{"a": 1, "b": 2}, 2]}, ""),
        (UNIQUE, {"n": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, "arguments['n'] of count: "),
        (PATTERNS, {"n": "no match", "other": "no integer"}, ""),
        (PATTERNS, {"n": 3}, "3 is not of type 'string'"),
    ],
)
def test_ordinary_schemas_are_accepted_and_errors_name_the_argument(
    schema: dict[str, Any], arguments: dict[str, Any], message: str
):
    made = tool(**schema)
    check_tool("x", made)
    found = complaint(made, arguments)
    assert message in str(found) and (found is None) == (not message)
    assert made.schema["function"]["parameters"] == made.parameters, "the model sees all of it"


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"n": {"pattern": "^(a+)+$"}}}, {"n": "a" * 10_000 + "b"}),
        ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, {"a" * 10_000 + "b": 1}),
        ({"properties": {"n": {"uniqueItems": True}}}, {"n": [{"a": n} for n in range(15_000)]}),
        (
            {"$defs": {"t": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["z"]}] * 4}},
             "properties": {"a": {"$ref": "#/$defs/t"}}},
            json.loads('{"a":' * 30 + "1" + "}" * 30),
        ),
        ({"properties": {"n": {"multipleOf": 0.1}}}, {"n": 10**400}),
        ({"properties": {"n": {}}}, json.loads('{"n":' + "[" * 200 + "]" * 200 + "}")),
    ],
)  # fmt: skip
def test_no_arguments_keep_the_loop_busy_or_escape(schema: dict[str, Any], arguments: Any):
    check_tool("x", tool(**schema))
    started = time.process_time()
    found = complaint(tool(**schema), arguments)
    assert time.process_time() - started < 2.0
    assert found is None or found.startswith("arguments")
