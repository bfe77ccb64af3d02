r"""Tags that are only quoted in text neither end a turn nor hide an answer."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.data.tool import blocks, closes
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.rollout.tool_call import parse_hermes, parse_retool
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import Prints, ScriptedEngine, call, roll_out

READ = {"hermes": parse_hermes, "retool": parse_retool}
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
BOTH = pytest.mark.parametrize("protocol", ["hermes", "retool"])


def mention(text: str, protocol: str) -> str:
    start, end = TAGS[protocol]
    return text.format(start=start, end=end)


@BOTH
@pytest.mark.parametrize("text", MENTIONS)
async def test_a_mentioned_tag_hides_neither_answer_nor_call(tokenizer, text: str, protocol: str):
    answered = READ[protocol](f"{mention(text, protocol)} So it is \\boxed{{4}}.")
    assert (answered.kind, answered.answer) == ("answer", "4")
    text_and_call = f"{mention(text, protocol)}\n{REAL[protocol]}"
    opened = open_protocol(protocol, tokenizer)
    prompt = opened.prompt_ids([{"role": "user", "content": "2 + 2?"}])
    engine = ScriptedEngine(tokenizer, [text_and_call, "\\boxed{4}<|im_end|>"])
    trajectory = await roll_out(prompt, engine, Prints(["4"]), opened, LIMITS)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, "4")
    assert [turn.text for turn in trajectory.turns] == [text_and_call, "\\boxed{4}"]
    parsed = trajectory.turns[0].parsed
    assert parsed is not None and (parsed.codes, parsed.repairs) == (("print(4)",), ())


@given(st.lists(st.sampled_from(["<c>", "</c>", "`", '"', "\n", "a b", "(", "```"]), max_size=14).map("".join))
def test_a_turn_is_cut_at_the_tag_that_ends_its_call(text: str):
    """The blocks are the same in the cut turn and in the whole text."""
    whole = [block for block in blocks(text, "<c>", "</c>") if block.closed]
    cuts = [at + 4 for at in range(len(text)) if text.startswith("</c>", at)]
    assert sum(closes(text[:cut], "<c>", "</c>") for cut in cuts) == len(whole)


@pytest.mark.parametrize("text", ["`<c>", "</c>`"])
def test_no_text_takes_long(text: str):
    started = time.process_time()
    list(blocks(text * 20_000, "<c>", "</c>"))
    assert time.process_time() - started < 2.0
