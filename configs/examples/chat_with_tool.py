"""Asks a served model with a code tool: python chat_with_tool.py URL/v1 MODEL "QUESTION".

Works with any server that has OpenAI's API. The code runs on this machine, in the sandbox.
"""

import asyncio
import json
import sys

import httpx

from retool_mcore.data.prompt_format import PromptFormat, recorded_format
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.sandbox import open_sandbox


async def answer(url: str, model: str, question: str, *, max_turns: int = 8, min_level: str = "namespaces") -> str:
    prompt_format = recorded_format(model) or PromptFormat()  # the format of training, if MODEL is an export's folder
    if prompt_format.protocol == "retool":
        raise SystemExit(f"{model} uses protocol retool, whose calls are part of the text. See docs/serving.md.")
    messages = prompt_format.messages(question)
    async with httpx.AsyncClient(timeout=600) as client, open_sandbox("local", min_level=min_level) as sandbox:
        for _ in range(max_turns):
            body = {"model": model, "messages": messages, "tools": [CODE_INTERPRETER]}
            reply = (await client.post(f"{url}/chat/completions", json=body)).raise_for_status().json()
            message = reply["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                try:
                    code = json.loads(call["function"]["arguments"])["code"]
                    shown = (await sandbox.execute(code)).text
                except (ValueError, KeyError, TypeError):
                    shown = 'Error: arguments must be an object with one string, "code".'
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": shown[:2000]})
    return f"No answer after {max_turns} turns."


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(answer(*sys.argv[1:4])) + "\n")
