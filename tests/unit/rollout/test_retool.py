"""Protocol retool: the engine stops exactly at a tag of several tokens."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.platforms.call_end import TABLE, CallEnd
from retool_mcore.platforms.patches_sglang import continue_without_a_tag
from retool_mcore.rollout.engine import EngineTurn, TurnRequest
from retool_mcore.rollout.protocol import Retool
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import ABORT, Prints, ScriptedEngine, roll_out

PIECES = ["<", "</", "a</", "/", "c", "co", "code", "de", "e", "ode>", ">", ">\n", "e>x", "</code>", "a</code>b", " "]
PIECES += ["x", "</tool_call>", "tool", "_call", "l", "ll", "o", "ool", "ll>\n", "t"]


@settings(max_examples=300)
@given(st.text(alphabet="</code>\n =-x", max_size=30), st.sampled_from(["", "\n", "\n\n", ">", ".", " "]))
def test_the_engine_stops_on_the_token_that_completes_the_tag(merging_tokenizer, before: str, after: str):
    """Of all prefixes of a block, the engine stops only at the one that completes the tag."""
    retool = Retool(merging_tokenizer)
    ids = merging_tokenizer.encode(f"<code>({before}</code>{after}", add_special_tokens=False)
    prefixes = [ids[:end] for end in range(1, len(ids) + 1)]
    stops = [prefix[-1] in retool.stop_token_ids and retool.ended(prefix) for prefix in prefixes]
    complete = ["</code>" in merging_tokenizer.decode(prefix) for prefix in prefixes]
    assert stops.index(True) == complete.index(True)


@pytest.mark.parametrize(
    ("tag", "parts"),
    [("</code>", ["<", "</", "co", "de", ">"]), ("</tool_call>", ["</", "t", "tool", "o", "ool", "_call", "l", ">"])],
)
@settings(max_examples=1000)
@given(data=st.data())
def test_token_ids_find_the_tag_where_the_text_has_it(tag: str, parts: list[str], data):
    tokens = data.draw(st.lists(st.sampled_from([*PIECES, *parts * 3]), max_size=14))
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    call_end = CallEnd.read(CallEnd.of(vocabulary, tag).as_json)
    ids = [vocabulary[token] for token in tokens]
    for end in range(1, len(ids) + 1):
        completed = "".join(tokens[:end]).count(tag) > "".join(tokens[: end - 1]).count(tag)
        assert call_end.complete(ids[:end]) == completed


@pytest.mark.parametrize(("processor", "kept"), [(None, False), ("a processor", True)])
def test_a_request_names_itself_only_to_processors_of_logits(processor: str | None, kept: bool):
    custom = {TABLE: CallEnd.of({"</code>": 1}, "</code>").as_json, "__req__": "itself"}
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom), custom_logit_processor=processor)
    assert continue_without_a_tag(lambda request, accepted: False)(request, [2]) is False
    assert ("__req__" in custom) == kept


async def test_a_request_has_the_number_of_tokens_of_its_turn(tokenizer):
    """After an abort, the engine looks for the start of the tag in these tokens only."""

    class Recording(ScriptedEngine):
        async def generate(self, request: TurnRequest) -> EngineTurn:
            requests.append(request)
            return await super().generate(request)

    requests: list[TurnRequest] = []
    retool = Retool(tokenizer)
    prompt = retool.prompt_ids([{"role": "user", "content": "What is 412 + 967?"}])
    called = "<code>\n```python\nprint(1)\n```\n</code>"
    engine = Recording(tokenizer, [called, "It is " + ABORT + "\\boxed{1}.<|im_end|>"])
    trajectory = await roll_out(prompt, engine, Prints(["1"]), retool, limits_for(max_response_tokens=2000))
    assert trajectory.answer == "1" and ABORT not in trajectory.turns[1].text
    # The ">" of <code> looks like the end of a call.
    opening, aborted = (len(tokenizer.encode(text, add_special_tokens=False)) for text in ("<code>", "It is "))
    assert [request.turn_tokens for request in requests] == [0, opening, 0, aborted]
    assert all(request.call_end is retool.call_end for request in requests)
