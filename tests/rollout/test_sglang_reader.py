"""Where SGLang's FunctionCallParser reads a call, ours reads the same; where it drops one, ours
still has a say.
"""

import json
import os
import random
import subprocess
import sys
import textwrap

import pytest

from retool_mcore.data.chat import chat_format, render
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.native_calls import READERS
from retool_mcore.rollout.tool_call import Parsed, code_calls, parse_hermes
from tests.template_styles import tokenizer_in

pytestmark = pytest.mark.slow

READ_BY_SGLANG = """
    import json, sys
    from retool_mcore.rollout.sglang_reader import sglang_reader
    from retool_mcore.rollout.tool_call import parse_hermes
    first = sglang_reader()
    out = []
    given = json.load(sys.stdin)
    for text in given["hermes"]:
        parsed = parse_hermes(text, first)
        out.append({"alone": len(first(text)), "kind": parsed.kind, "codes": parsed.codes, "repairs": parsed.repairs})
    native = [[sglang_reader(parser=name)(text) for text in said] for name, said in given["native"].items()]
    print(json.dumps({"hermes": out, "native": native}))
"""
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
    said = tokenizer.decode([i for i, loss in zip(rendered.token_ids, rendered.loss_mask, strict=True) if loss])
    return said.removesuffix(chat_format(tokenizer).end_of_turn)


def test_both_readers_agree():
    inputs = texts(400)
    native = {name: [written(style, code) for code in CODES] for name, style in NATIVE.items()}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ_BY_SGLANG)],
        input=json.dumps({"hermes": inputs, "native": native}),
        env={**os.environ, **get_platform("cpu").process_env()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Failed to parse" not in done.stderr, "SGLang's warnings repeat the model's text"
    found = json.loads(done.stdout.splitlines()[-1])
    for name, calls in zip(native, found["native"], strict=True):
        assert calls == [[["code_interpreter", {"code": code}]] for code in CODES], name
        assert [READERS[name](text).codes for text in native[name]] == [(code,) for code in CODES], name
    read = found["hermes"]
    ours = [parse_hermes(text) for text in inputs]
    assert sum(row["alone"] > 0 for row in read) > 200, "SGLang reads the undamaged calls"
    assert sum(row["alone"] == 0 and row["kind"] == "tool_call" for row in read) > 10, "and ours repairs some others"
    for text, row, parsed in zip(inputs, read, ours, strict=True):
        assert Parsed(kind=row["kind"], calls=code_calls(*row["codes"])) == Parsed(
            kind=parsed.kind, calls=code_calls(*parsed.codes)
        ), text
