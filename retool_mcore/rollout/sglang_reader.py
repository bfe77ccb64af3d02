"""SGLang's own FunctionCallParser as the first reader of hermes calls, if SGLang is the engine.

It agrees with our reader on the calls that it can read (tests/rollout/test_sglang_reader.py). It
drops the others; our reader then repairs them or tells the model what is wrong.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.rollout.tool_call import CallReader
from retool_mcore.rollout.tools import Tool

PARSER = "qwen25"  # SGLang's name for the hermes form


def sglang_reader(others: Sequence[Tool] = (), parser: str = PARSER) -> CallReader:
    """The reader; ``others``: tools beside the interpreter; ``parser``: SGLang's name of a form.

    Importing SGLang's parser takes seconds, once per process.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool as Declared  # pyright: ignore[reportMissingTypeStubs]
    from sglang.srt.function_call.function_call_parser import FunctionCallParser  # pyright: ignore[reportMissingTypeStubs]

    # SGLang logs a warning with the whole text of each call that it cannot read. We count such
    # calls and tell the model.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)
    tools = [Declared(**schema) for schema in (CODE_INTERPRETER, *(tool.schema for tool in others))]

    def read(text: str) -> list[tuple[str | None, Any]]:
        try:
            _, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
            return [(call.name, json.loads(call.parameters)) for call in calls]
        except (AttributeError, ValueError, RecursionError):  # JSON that is no object, or beyond Python's limits
            return []

    return read
