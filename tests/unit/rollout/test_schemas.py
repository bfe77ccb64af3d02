"""A schema that cannot be checked is refused at start; arguments are checked against the others."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
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
        ({"$ref": "#/$defs/none"}, "PointerToNowhere"),
        ({"$ref": "other.json#/x"}, "other.json"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
        ({"description": "x" * (300 << 10)}, "characters, and at most"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_at_start(schema: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        check_tool("rollout.mcp.x", tool(**schema))
    assert message in str(error.value) and "leave this tool out" in str(error.value)


def test_a_schema_makes_the_trainer_fetch_nothing():
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "cannot be checked" in str(complaint(tool(**{"$ref": f"http://127.0.0.1:{server.server_port}/x"}), {}))
    finally:
        server.shutdown()
    assert requested == []


def test_arguments_are_checked_with_references_and_required_names():
    good = tool(
        **{
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "$ref": {}}}},
            "properties": {"id": {"type": "string"}, "node": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
            "required": ["id"],
        }
    )
    check_tool("x", good)
    assert complaint(good, {"id": "ab-12", "node": {"next": {"next": {}}}}) is None
    assert complaint(good, {"id": 12}) == "arguments['id'] of count: 12 is not of type 'string'"
    assert complaint(good, {}) == "arguments of count: 'id' is a required property"
    assert "Additional properties are not allowed ('x' was unexpected)" in str(complaint(good, {"id": "a", "x": 1}))


def test_patterns_are_shown_to_the_model_and_not_checked():
    """Python cannot read ``\\p{L}``, which is JavaScript's. The other pattern would take hours."""
    patterns = {"patternProperties": {"^\\p{L}+$": {"type": "integer"}}, "additionalProperties": False}
    named = tool(properties={"n": {"type": "string", "pattern": "^(a+)+$"}}, **patterns)
    check_tool("x", named)
    assert named.schema["function"]["parameters"]["properties"]["n"]["pattern"] == "^(a+)+$"
    started = time.process_time()
    assert complaint(named, {"n": "a" * 10_000 + "b", "other": "not an integer"}) is None
    assert complaint(named, {"n": 3}) == "arguments['n'] of count: 3 is not of type 'string'"
    assert time.process_time() - started < 2.0
