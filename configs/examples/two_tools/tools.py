"""A custom tool for use together with the interpreter: it looks up the prices of a shop."""

from collections.abc import Mapping
from typing import Any

from retool_mcore.rollout.tools import Tool, ToolError

# All prices have three digits, because a tiny model learns to copy numbers of a fixed width in 100
# steps.
PRICES = {
    "pen": 137, "box": 412, "lamp": 865, "cup": 254, "book": 391, "chair": 948, "clock": 573, "plate": 186,
    "spoon": 119, "knife": 327, "rug": 764, "vase": 635, "bag": 482, "hat": 271, "bell": 158, "drum": 839,
}  # fmt: skip


class Lookup(Tool):
    """Returns the price of a thing. For an unknown thing, the model sees an error."""

    name = "lookup"
    description = "Returns the price of a thing."
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
