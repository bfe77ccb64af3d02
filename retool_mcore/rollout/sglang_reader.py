"""SGLang's own FunctionCallParser as the first reader of hermes calls, where SGLang is the engine.

On the calls it reads it agrees with ours (tests/rollout/test_sglang_reader.py); it drops those it
cannot read, and then ours repairs them or tells the model why not.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.rollout.tool_call import CallReader

PARSER = "qwen25"  # SGLang's name of the hermes form


def sglang_reader() -> CallReader:
    """The reader. Importing SGLang's parser takes seconds, once a process."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    # It warns of each call it cannot read, with the whole text; we count those and tell the model.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)
    tools = [Tool(**CODE_INTERPRETER)]

    def read(text: str) -> list[tuple[str | None, Any]]:
        try:
            _, calls = FunctionCallParser(tools, PARSER).parse_non_stream(text)
            return [(call.name, json.loads(call.parameters)) for call in calls]
        except (AttributeError, ValueError, RecursionError):  # JSON that is no object, or beyond Python's limits
            return []

    return read
