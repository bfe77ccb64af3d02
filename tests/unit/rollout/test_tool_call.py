"""Parsers take text and return one reading. They repair a call only if it has one interpretation.

calls.jsonl has turns in the hermes format, or in the format of their "protocol": the text, and
either the calls' code with the kinds of repairs, or the problem and its message, or the answer. A
block of protocol retool that is not closed ends the model's message: the loop runs nothing.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.rollout import app
from retool_mcore.data.files import read_jsonl
from retool_mcore.rollout.tool_call import PARSERS, parse_hermes

CASES = [case for _, case in read_jsonl(Path(__file__).with_name("calls.jsonl"))]


def turn(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(code: str) -> str:
    """A call with ``code`` pasted in unescaped, as a model may write it."""
    return '{"name": "code_interpreter", "arguments": {"code": "' + code + '"}}'


def block(code: str) -> str:
    return f"<code>\n```python\n{code}\n```\n</code>"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:60])
def test_a_turn_is_read_repaired_or_refused(case: dict[str, Any]):
    parsed = PARSERS[case.get("protocol", "hermes")](case["text"])
    if "problem" in case:
        assert (parsed.kind, parsed.problem, parsed.codes) == ("malformed", case["problem"], ())
        assert case["error"] in str(parsed.error)
    elif "answer" in case:
        assert (parsed.kind, parsed.answer) == ("text" if case["answer"] is None else "answer", case["answer"])
    else:
        assert (parsed.kind, list(parsed.codes), list(parsed.repairs)) == ("tool_call", case["codes"], case["repairs"])


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_code_that_was_encoded_as_json_comes_back_unchanged(code: str):
    if "tool_call>" in code or "```" in code:
        return
    body = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    parsed = parse_hermes(turn(body))
    assert (parsed.codes, parsed.repairs) == ((code,), ())


@given(st.text())
def test_no_text_raises(text: str):
    for whole in (text, turn(text), turn(call(text)), turn(call(text)[:-1]), block(text)):
        for parse in PARSERS.values():
            assert parse(whole).kind in {"tool_call", "answer", "text", "malformed"}


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 10_000,
        turn(call('"' * 60_000)),
        turn(call("```python\\n" + " " * 60_000 + "x")),
        turn('{"name": "code_interpreter", "arguments": {"code": "x"' + " " * 60_000 + "{"),
        turn(call("(" * 60_000)),
        turn("[" * 100_000),
        turn("{'a': " * 20_000),
        "<tool_call>" * 10_000,
        "`<tool_call>" * 10_000,
        "</tool_call>`" * 10_000,
        '{"name": ' * 20_000,
        "[TOOL_CALLS]" + " " * 60_000 + "x",
        "<tool_call>\n<function=f>" + " " * 60_000,
        "<tool_call><function=code_interpreter>" + "<parameter=code>\n" * 20_000 + "</tool_call>",
    ],
    ids=lambda text: f"{text[:60]}..{len(text)}",
)
def test_no_text_takes_long(text: str):
    for parse in PARSERS.values():
        started = time.process_time()
        assert parse(text).kind in {"tool_call", "answer", "text", "malformed"}
        assert time.process_time() - started < 2.0


def test_an_unknown_escape_in_the_models_code_does_not_warn():
    with warnings.catch_warnings(action="error"):  # of a repair that checks whether the code is Python
        parsed = parse_hermes(turn(call(r"import re\nre.findall('\d+', '12')")))
    assert parsed.kind == "tool_call" and r"\d" in parsed.codes[0]


def test_the_command_prints_the_reading_as_json_and_refuses_an_unknown_protocol():
    text = r"The tags `<tool_call>` and </code> alone are not a call. \boxed{4}"
    done = CliRunner().invoke(app, ["parse", "--protocol", "retool", "--json"], input=text)
    assert json.loads(done.stdout) == {"kind": "answer", "code": None, "answer": "4", "error": None, "repairs": []}
    done = CliRunner().invoke(app, ["parse", "--protocol", "xml"], input="hi")
    assert done.exit_code == 2 and "Unknown protocol 'xml'. Choose one of: hermes, " in done.output
