"""The one tool: its name, what a chat template is told of it, and how a call of it is written."""

from __future__ import annotations

from typing import Any

TOOL_NAME = "code_interpreter"
CODE_INTERPRETER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Runs Python code and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}

CALL_START, CALL_END = "<tool_call>", "</tool_call>"  # hermes: a JSON object between them
CODE_START, CODE_END = "<code>", "</code>"  # the paper's own form: Python between them


def tool_call(code: str) -> dict[str, Any]:
    """A call as a message's ``tool_calls`` holds it, which a chat template writes out."""
    return {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"code": code}}}
