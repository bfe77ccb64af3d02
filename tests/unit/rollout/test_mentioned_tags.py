"""Tags that are only quoted in text neither end a turn nor hide an answer."""

import pytest

from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.protocol import open_protocol
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import Prints, ScriptedEngine, call, roll_out

TAGS = {"hermes": ("<tool_call>", "</tool_call>"), "retool": ("<code>", "</code>")}
REAL = {"hermes": call("print(4)"), "retool": "<code>\n```python\nprint(4)\n```\n</code>"}
MENTIONS = [
    "Calls begin with {start}\nand are not needed here.",
    "A call stands between `{start}` and `{end}`.",
    'A call stands between "{start}" and "{end}".',
    "A call is `{start}...{end}`.",
    "Nothing follows the closing {end} then.",
]
LIMITS = limits_for(max_response_tokens=900)


@pytest.mark.parametrize("protocol", ["hermes", "retool"])
@pytest.mark.parametrize("text", MENTIONS)
async def test_a_mentioned_tag_hides_neither_answer_nor_call(tokenizer, text: str, protocol: str):
    start, end = TAGS[protocol]
    mention = text.format(start=start, end=end)
    opened = open_protocol(protocol, tokenizer)
    answered = opened.read((), f"{mention} So it is \\boxed{{4}}.")
    assert (answered.kind, answered.answer) == ("answer", "4")
    text_and_call = f"{mention}\n{REAL[protocol]}"
    prompt = opened.prompt_ids([{"role": "user", "content": "2 + 2?"}])
    engine = ScriptedEngine(tokenizer, [text_and_call, "\\boxed{4}<|im_end|>"])
    trajectory = await roll_out(prompt, engine, Prints(["4"]), opened, LIMITS)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, "4")
    assert [turn.text for turn in trajectory.turns] == [text_and_call, "\\boxed{4}"]
    parsed = trajectory.turns[0].parsed
    assert parsed is not None and (parsed.codes, parsed.repairs) == (("print(4)",), ())
