"""Model text in, one reading out: calls are repaired only where they can mean one thing."""

import ast
import gc
import json
import sys
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.rollout.tool_call import Parsed, code_calls, parse_hermes


def turn(body: str, text: str = "") -> str:
    return f"{text}<tool_call>\n{body}\n</tool_call>"


def call(code: str) -> str:
    """A call with ``code`` pasted in unescaped, as a model may write it."""
    return '{"name": "code_interpreter", "arguments": {"code": "' + code + '"}}'


def test_a_valid_call_is_read_without_repair():
    parsed = parse_hermes(turn(call('x = 6\\nprint(\\"a\\", x)'), text="Let me compute.\n"))
    assert parsed == Parsed(kind="tool_call", calls=code_calls('x = 6\nprint("a", x)'))


@pytest.mark.parametrize(
    ("body", "code", "repairs"),
    [
        (call("x = 1\nprint(x)"), "x = 1\nprint(x)", ("control_characters",)),
        (call("\tprint(1)").replace("\t", "if 1:\n\t"), "if 1:\n\tprint(1)", ("control_characters",)),
        (call(r"import re\nre.sub('\d', '', s)"), "import re\nre.sub('\\d', '', s)", ("backslashes",)),
        (call('print("hi")'), 'print("hi")', ("raw_quotes",)),
        (call(r'print("a\nb")'), r'print("a\nb")', ("raw_quotes", "backslashes")),
        (call(r'a = 1\nprint("a")'), 'a = 1\nprint("a")', ("raw_quotes",)),
        (call("x = 1\nprint('a\\nb')"), "x = 1\nprint('a\\nb')", ("control_characters", "backslashes")),
        (call("print(1)") + "}", "print(1)", ("trailing_data",)),
        (call("print(1)") + "\nNow I run it.", "print(1)", ("trailing_data",)),
        (call("print(1)")[:-1], "print(1)", ("missing_brace",)),
        (call("print(1)")[:-2], "print(1)", ("missing_brace",)),
        (call("x = 1\nprint(x)")[:-1], "x = 1\nprint(x)", ("control_characters", "missing_brace")),
        ("{'name': 'code_interpreter', 'arguments': {'code': 'print(1)'}}", "print(1)", ("single_quotes",)),
        (call(r"```python\nprint(1)\n```"), "print(1)", ("code_fence",)),
        (call("```python\nprint(1)\n```"), "print(1)", ("control_characters", "code_fence")),
        ('{"arguments": {"code": "print(1)\n"}, "name": "code_interpreter"}', "print(1)\n", ("control_characters",)),
        (
            '{"name": "code_interpreter", "arguments": "{\\"code\\": \\"print(1)\\"}"}',
            "print(1)",
            ("encoded_arguments",),
        ),
        ("[" + call("print(1)") + "]", "print(1)", ("list",)),
        ('{"name": "code_interpreter", "parameters": {"code": "print(1)"}}', "print(1)", ("parameters_key",)),
    ],
)  # fmt: skip
def test_a_call_with_one_reading_is_repaired(body: str, code: str, repairs: tuple[str, ...]):
    parsed = parse_hermes(turn(body))
    assert parsed.kind == "tool_call", parsed.error
    assert parsed.codes == (code,)
    assert parsed.repairs == repairs


@pytest.mark.parametrize(
    ("text", "problem", "told"),
    [
        (turn("print(1)"), "json", "not valid JSON"),
        (turn(""), "json", "not valid JSON"),
        (turn("[1, 2]"), "json", "JSON, but not an object"),
        (turn(call("print(1)").replace("code_interpreter", "python")), "name", "no tool named 'python'"),
        (turn('{"name": "code_interpreter"}'), "arguments", 'one string, "code"'),
        (turn('{"name": "code_interpreter", "arguments": {"code": 3}}'), "arguments", 'one string, "code"'),
        (turn('{"name": "code_interpreter", "arguments": {"code": "\\ud800"}}'), "arguments", "surrogate"),
        ('{"name": "code_interpreter"}\n</tool_call>', "tags", "no opening tag"),
        # Two calls in one pair of tags, and quotes that may close the code or not: several
        # readings, so none.
        (turn(call("print(1)") + call("print(2)")), "json", "Extra data"),
        (turn(call('print("a"')), "json", "not valid JSON"),
        (turn("[" * 100_000), "json", "nested too deeply"),
        (turn(call("1")[:-4] + "9" * 5000 + "}}"), "json", "not valid JSON"),
        (turn('{"name": ' + "9" * 5000 + "}"), "json", "too large a number"),
    ],
)
def test_a_call_without_a_single_reading_is_malformed_and_says_why(text: str, problem: str, told: str):
    parsed = parse_hermes(text)
    assert (parsed.kind, parsed.problem, parsed.codes) == ("malformed", problem, ())
    assert parsed.error is not None and told in parsed.error


@pytest.mark.parametrize(
    "code",
    [
        r'print("a\tb")',  # a tab, or a backslash and a t
        'x = 1\nprint("a\\tb")',
        r'print("\d", "a\tb")',
    ],
)
def test_code_that_is_python_decoded_and_as_it_stands_is_not_guessed(code: str):
    readings = {code, code.replace("\\t", "\t")}
    assert len(readings) == 2
    for reading in readings:
        ast.parse(reading)
    parsed = parse_hermes(turn(call(code)))
    assert (parsed.kind, parsed.problem, parsed.codes) == ("malformed", "json", ())


@pytest.mark.parametrize(
    "body", [call('print("hi")'), "{'name': 'code_interpreter', 'arguments': {'code': 'print()'}}"]
)
def test_a_garbage_collection_that_parses_does_not_end_the_trajectory(body: str):
    """Up to Python 3.11.7 the outer ast.parse then raises SystemError."""
    num_within = 0

    def parse(phase: str, _: object) -> None:
        nonlocal num_within
        if phase == "start" and sys._getframe(1).f_code is ast.parse.__code__:
            num_within += 1
            if num_within == 1:
                ast.parse("1 + 1")

    parsed = parse_hermes(turn(body))
    thresholds = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(1)
    try:
        again = parse_hermes(turn(body))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse)
    assert num_within >= 1
    assert parsed.kind == "tool_call"
    assert again == parsed


def test_two_escapes_of_one_character_are_decoded_together():
    r"""\ud83d\ude00 is one character; each half alone is none, and the call would be refused for
    it.
    """
    parsed = parse_hermes(turn(call(r"print(1)\nprint('\d \ud83d\ude00')")))
    assert parsed.codes == ("print(1)\nprint('\\d \U0001f600')",)
    assert parsed.repairs == ("backslashes",)
    half = parse_hermes(turn(call(r"print(1)\nprint('\d \ud83d')")))
    assert (half.kind, half.problem, half.codes) == ("malformed", "arguments", ())
    assert half.error is not None and "half of a surrogate pair" in half.error


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 10_000,
        turn(call("x" + " " * 60_000 + "{")),
        turn(call('"' * 60_000)),
        turn(call("```python\\n" + " " * 60_000 + "x")),
        turn('{"name": "code_interpreter", "arguments": {"code": "' + "\\" * 60_001),
        turn('{"name": "code_interpreter", "arguments": {"code": "x"' + " " * 60_000 + "{"),
        turn(call("(" * 60_000)),
        turn('{"name": "code_interpreter", "arguments": {"code": ' + "1" * 60_000 + "}}"),
        turn("{'a': " * 20_000),
        "<tool_call>" * 10_000,
    ],
    ids=lambda text: f"{text[:60]}..{len(text)}",
)
def test_no_text_takes_long(text: str):
    started = time.process_time()
    parse_hermes(text)
    assert time.process_time() - started < 1.0


def test_all_calls_of_a_turn_are_read_in_order():
    parsed = parse_hermes(turn(call("print(1)")) + "\n" + turn(call("print(2)")))
    assert parsed.codes == ("print(1)", "print(2)")


def test_one_unreadable_call_makes_the_turn_malformed():
    assert parse_hermes(turn(call("print(1)")) + "\n" + turn("nonsense")).kind == "malformed"


def test_a_call_without_its_end_tag_is_read():
    parsed = parse_hermes("<tool_call>\n" + call("print(1)"))
    assert (parsed.kind, parsed.codes, parsed.repairs) == ("tool_call", ("print(1)",), ("missing_end_tag",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", Parsed(kind="answer", answer=r"\frac{1}{2}")),
        ("the answer is 3", Parsed(kind="text")),
        (r"\boxed{1", Parsed(kind="text")),
    ],
)
def test_a_turn_without_tags_is_an_answer_or_text(text: str, expected: Parsed):
    assert parse_hermes(text) == expected


def test_json_form_has_exactly_the_documented_keys():
    assert parse_hermes("hello").to_json() == {
        "kind": "text",
        "code": None,
        "answer": None,
        "error": None,
        "repairs": [],
    }


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_code_that_was_encoded_as_json_comes_back_unchanged(code: str):
    if "tool_call>" in code or "```" in code:
        return
    body = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    parsed = parse_hermes(turn(body))
    assert (parsed.codes, parsed.repairs) == ((code,), ())


@given(st.text())
def test_no_text_raises(text: str):
    for whole in (text, turn(text), turn(call(text)), turn(call(text)[:-1])):
        assert parse_hermes(whole).kind in {"tool_call", "answer", "text", "malformed"}


PLAIN = call("print(1)")
PARAMETERS = PLAIN.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("text", "repairs"),
    [
        (turn(f"```json\n{PLAIN}\n```"), ("json_fence",)),
        (turn(f"```\n{PLAIN}\n```"), ("json_fence",)),
        ("<tool_call>\n" + turn(PLAIN), ("doubled_tag",)),
        ("<tool_call><tool_call>" + turn(f"```json\n{PLAIN}\n```"), ("doubled_tag", "json_fence")),
        (turn('{"type": "function", "function": ' + PLAIN + "}"), ("function_wrapper",)),
        (turn('{"function": ' + PARAMETERS + "}"), ("function_wrapper", "parameters_key")),
        (f"I use the <tool_call> tag.\n{turn(PLAIN)}", ()),
    ],
)  # fmt: skip
def test_malformed_calls_of_public_reports_are_read(text: str, repairs: tuple[str, ...]):
    parsed = parse_hermes(text)
    assert (parsed.kind, parsed.codes, parsed.repairs) == ("tool_call", ("print(1)",), repairs)


@pytest.mark.parametrize(
    "body",
    [
        call(r"import re\nre.findall('\d+', '12')"),  # a call that is repaired by asking whether its code is Python
        r"{'name': 'code_interpreter', 'arguments': {'code': 'print(1, \'\d\')'}}",  # one that is Python's literal
    ],
)
def test_an_escape_of_the_models_code_that_python_does_not_know_warns_nobody(body: str):
    with warnings.catch_warnings(action="error"):
        parsed = parse_hermes(turn(body))
    assert parsed.kind == "tool_call" and r"\d" in parsed.codes[0]
