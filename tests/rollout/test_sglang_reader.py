"""Where SGLang's FunctionCallParser reads a call, ours reads the same; where it drops one, ours
still has a say.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap

import pytest

from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.tool_call import Parsed, code_calls, parse_hermes

pytestmark = pytest.mark.slow

READ_BY_SGLANG = """
    import json, sys
    from retool_mcore.rollout.sglang_reader import sglang_reader
    from retool_mcore.rollout.tool_call import parse_hermes
    first = sglang_reader()
    out = []
    for text in json.load(sys.stdin):
        parsed = parse_hermes(text, first)
        out.append({"alone": len(first(text)), "kind": parsed.kind, "codes": parsed.codes, "repairs": parsed.repairs})
    print(json.dumps(out))
"""


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


def test_both_readers_agree():
    inputs = texts(400)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ_BY_SGLANG)],
        input=json.dumps(inputs),
        env={**os.environ, **get_platform("cpu").process_env()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Failed to parse" not in done.stderr, "SGLang's warnings repeat the model's text"
    read = json.loads(done.stdout.splitlines()[-1])
    ours = [parse_hermes(text) for text in inputs]
    assert sum(row["alone"] > 0 for row in read) > 200, "SGLang reads the undamaged calls"
    assert sum(row["alone"] == 0 and row["kind"] == "tool_call" for row in read) > 10, "and ours repairs some others"
    for text, row, parsed in zip(inputs, read, ours, strict=True):
        assert Parsed(kind=row["kind"], calls=code_calls(*row["codes"])) == Parsed(
            kind=parsed.kind, calls=code_calls(*parsed.codes)
        ), text
