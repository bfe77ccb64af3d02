"""A user's own tool, offered together with the interpreter: the prices of a shop."""

from collections.abc import Mapping
from typing import Any

from retool_mcore.rollout.tools import Tool, ToolError

# All prices have three digits: a tiny model learns to copy numbers of one width in a hundred steps.
PRICES = {
    "pen": 137, "box": 412, "lamp": 865, "cup": 254, "book": 391, "chair": 948, "clock": 573, "plate": 186,
    "spoon": 119, "knife": 327, "rug": 764, "vase": 635, "bag": 482, "hat": 271, "bell": 158, "drum": 839,
}  # fmt: skip


class Lookup(Tool):
    """Tells what a thing costs. The model sees an error for a thing that the shop does not have."""

    name = "lookup"
    description = "Tells the price of a thing."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"thing": {"type": "string"}},
        "required": ["thing"],
    }
    max_calls = 4

    async def call(self, arguments: Mapping[str, Any], state: Any) -> str:
        thing = str(arguments["thing"])
        if thing not in PRICES:
            raise ToolError(f"the shop has no {thing!r}")
        return str(PRICES[thing])
