"""A custom tool: rollout.tools = ["code_interpreter", "configs.examples.tools:Search"].

It searches a corpus, one fact per line, for the facts that share the most words with a query.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retool_mcore.rollout.tools import Tool, ToolError

CORPUS = Path(__file__).with_name("facts.txt")


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{3,}", text.lower()))


class Search(Tool):
    name = "search"
    description = "Searches a collection of facts of mathematics."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    max_calls = 4

    def __init__(self) -> None:
        self.facts = CORPUS.read_text(encoding="utf-8").splitlines()

    async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
        wanted = words(arguments["query"])
        if not wanted:
            raise ToolError("the query has no word of three or more letters")
        found = sorted(self.facts, key=lambda fact: -len(wanted & words(fact)))[:3]
        return "\n".join(fact for fact in found if wanted & words(fact)) or "Nothing was found."
