"""The only tool: its name, its schema for chat templates, and how a call is written."""

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
    """A call in the form of a message's ``tool_calls``, which a chat template writes out."""
    return {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"code": code}}}
