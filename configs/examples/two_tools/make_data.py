"""Makes conversations with two tools, problems for RL, and a tiny model, in a user's own format.

    python -m configs.examples.two_tools.make_data runs/two_tools

A problem asks for the total price of two things. In a conversation, the model looks up both prices
in two calls of one turn and calculates the total with the interpreter. In half of the conversations
the code omits the second thing; RL has to unlearn this mistake.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.examples.two_tools.tools import PRICES, Lookup
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tool import CODE_INTERPRETER, TOOL_NAME

SYSTEM_PROMPT = "You work in a shop. Put the answer in \\boxed{}."
TOOLS = [CODE_INTERPRETER, Lookup().schema]
SIZES = {"conversations": 4096, "problems": 640}


@dataclass(frozen=True)
class Order:
    """An order of two things with their counts. All totals have six digits."""

    first: str
    second: str
    first_count: int
    second_count: int

    @property
    def question(self) -> str:
        return f"What do {self.first_count} of {self.first} and {self.second_count} of {self.second} cost?"

    @property
    def right(self) -> str:
        return f"print({self.first_count} * {PRICES[self.first]} + {self.second_count} * {PRICES[self.second]})"

    @property
    def wrong(self) -> str:
        return f"print({self.first_count} * {PRICES[self.first]})"

    @property
    def one(self) -> int:
        return self.first_count * PRICES[self.first]

    @property
    def total(self) -> int:
        return self.one + self.second_count * PRICES[self.second]


def orders(seed: int) -> Iterator[Order]:
    """An infinite sequence of distinct orders."""
    draw, seen = random.Random(f"two tools {seed}"), set[Order]()
    while True:
        first, second = draw.sample(sorted(PRICES), 2)
        order = Order(first, second, draw.randint(100, 999), draw.randint(100, 999))
        if order not in seen and order.one >= 100_000 and order.total <= 999_999:
            seen.add(order)
            yield order


def conversation(order: Order, *, right: bool) -> dict[str, Any]:
    """A row in OpenAI's format, as users have them: with call ids, JSON arguments and schemas."""
    code, output = (order.right, order.total) if right else (order.wrong, order.one)
    things = (order.first, order.second)
    lookups = [_call(f"lookup_{number}", Lookup.name, thing=thing) for number, thing in enumerate(things)]
    results = [
        {"role": "tool", "tool_call_id": f"lookup_{number}", "content": str(PRICES[thing])}
        for number, thing in enumerate(things)
    ]
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": order.question},
        {"role": "assistant", "content": "", "tool_calls": lookups},
        *results,
        {"role": "assistant", "content": "", "tool_calls": [_call("run", TOOL_NAME, code=code)]},
        {"role": "tool", "tool_call_id": "run", "content": str(output)},
        {"role": "assistant", "content": f"The answer is \\boxed{{{output}}}."},
    ]
    return {"messages": messages, "tools": TOOLS}


def _call(call_id: str, name: str, **arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def make(folder: Path, sizes: dict[str, int] = SIZES, seed: int = 0) -> None:
    """Write conversations.jsonl, problems.jsonl and model/."""
    stream, draw = orders(seed), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    conversations = [
        conversation(order, right=draw.random() < 0.5) for order in itertools.islice(stream, sizes["conversations"])
    ]
    problems = [
        {"question": order.question, "total": str(order.total)} for order in itertools.islice(stream, sizes["problems"])
    ]
    for name, rows in (("conversations", conversations), ("problems", problems)):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    samples = [_for_tokenizer(row) for row in conversations[:512]]
    write_model(folder / "model", build_tokenizer(samples), seed)


def _for_tokenizer(row: dict[str, Any]) -> dict[str, Any]:
    """The conversation with arguments as objects, which chat templates need."""
    messages = [dict(message) for message in row["messages"]]
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in calls
            ]
    return {**row, "messages": messages}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
