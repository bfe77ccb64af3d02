"""Our parsers read the calls that SGLang's FunctionCallParser reads, and repair some others."""

import json
import logging
import random
from typing import Any

from retool_mcore.data.chat import chat_format, render
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.rollout.tool_call import PARSERS, Malformed, call_of, parse_hermes
from tests.template_styles import tokenizer_in

NATIVE = {
    "qwen3_coder": "Qwen3-Coder",
    "llama3": "Llama 3 with python_tag",
    "mistral": "Mistral v11: name and arguments",
}
CODES = ["print(1)", "x = \"a\\n\"\nprint(x, '</b>')", "if a < b:\n    print('é')"]


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    pieces = ["print(1)", "\n", '"', "'", "\\", "\\n", "{", "}", "x = 2", "é", "\t", "```python\n", "```", "<", "0"]
    made: list[str] = []
    for _ in range(count):
        code = "".join(draw.choice(pieces) for _ in range(draw.randrange(8)))
        body = json.dumps({"name": "code_interpreter", "arguments": {"code": code}}, ensure_ascii=draw.random() < 0.5)
        damage = draw.choice(["", "", "", "unescape", "cut", "brace", "breaks", "name", "list", "number"])
        body = {
            "unescape": body.replace("\\", ""),
            "cut": body[: draw.randrange(len(body))],
            "brace": body[:-1],
            "breaks": body.replace("\\n", "\n"),
            "name": body.replace("code_interpreter", "python"),
            "list": f"[{body}]",
            "number": '{"name": ' + "9" * 5000 + "}",
        }.get(damage, body)
        made.append(f"Let me see.\n<tool_call>\n{body}\n</tool_call>" * draw.choice([1, 1, 2]))
    return made


def written(style: str, code: str) -> str:
    """A turn with one call as a template of this style writes it."""
    tokenizer = tokenizer_in(style)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [tool_call(code)]}]
    rendered = render(messages, [CODE_INTERPRETER], tokenizer)
    turn = tokenizer.decode([i for i, loss in zip(rendered.token_ids, rendered.loss_mask, strict=True) if loss])
    return turn.removesuffix(chat_format(tokenizer).end_of_turn)


def checked(calls: list[Any]) -> tuple[str, ...]:
    """The code of the calls that SGLang has read, after our checks; none if they refuse one."""
    try:
        return tuple(call_of(name, arguments, [], ()).code for name, arguments in calls)
    except Malformed:
        return ()


def test_our_parsers_agree_with_sglangs(verl_on_cpu: None):
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def read(text: str, parser: str) -> list[Any]:
        try:
            _, calls = FunctionCallParser([Tool(**CODE_INTERPRETER)], parser).parse_non_stream(text)
            return [(call.name, json.loads(call.parameters)) for call in calls]
        except (AttributeError, ValueError, RecursionError):  # JSON that is no object, or beyond Python's limits
            return []

    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    for name, style in NATIVE.items():
        for code in CODES:
            text = written(style, code)
            assert read(text, name) == [("code_interpreter", {"code": code})], name
            assert PARSERS[name](text).codes == (code,), name
    inputs = texts(400)
    theirs, ours = [read(text, "qwen25") for text in inputs], [parse_hermes(text) for text in inputs]
    assert sum(len(calls) > 0 for calls in theirs) > 200, "SGLang reads the undamaged calls"
    assert sum(not calls and parsed.kind == "tool_call" for calls, parsed in zip(theirs, ours, strict=True)) > 10
    for text, calls, parsed in zip(inputs, theirs, ours, strict=True):
        whole = len(calls) == text.count("<tool_call>") == text.count("</tool_call>")  # it drops invalid calls
        if whole and calls:
            assert parsed.codes == checked(calls), text
