"""verl's answers as the loop takes them: why a turn ended, with and without tokens."""

import asyncio
from typing import Any

import pytest

from retool_mcore.rollout.engine import EngineTurn, Sampling, TurnRequest

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
STOP = 7


def turn(reason: str, token_ids: list[int], log_probs: list[float] | None) -> EngineTurn:
    """One answer of verl's client, in the words that its servers use, as our engine hands it on."""
    from verl.workers.rollout.replica import TokenOutput

    from retool_mcore.verl.agent_loop import VerlEngine

    class Client:
        async def generate(self, **_: Any) -> TokenOutput:
            return TokenOutput(
                token_ids=token_ids, log_probs=log_probs, stop_reason=reason, extra_fields={"max_global_steps": 4}
            )

    request = TurnRequest(
        token_ids=[1, 2], max_new_tokens=8, stop_token_ids=[STOP], sampling=Sampling(), trajectory_id="a"
    )
    return asyncio.run(VerlEngine(Client()).generate(request))


@pytest.mark.parametrize("reason", ["abort", "aborted"])
def test_an_abort_before_the_first_token_has_no_log_probabilities(reason: str):
    """Of verl's vLLM server, for a request that a weight sync cut off or kept out."""
    answer = turn(reason, [], None)
    assert (answer.token_ids, answer.logprobs, answer.stop, answer.version) == ([], [], "abort", 4)


@pytest.mark.parametrize("reason", ["abort", "aborted"])
@pytest.mark.parametrize("last", [5, STOP])
def test_an_abort_keeps_what_was_sampled(reason: str, last: int):
    answer = turn(reason, [3, last], [-0.5, -1.0])
    assert (answer.token_ids, answer.logprobs, answer.stop) == ([3, last], [-0.5, -1.0], "abort")


@pytest.mark.parametrize(("last", "stop"), [(STOP, "stop"), (5, "length")])
def test_vllm_says_completed_and_the_last_token_says_why(last: int, stop: str):
    assert turn("completed", [3, last], [-0.5, -1.0]).stop == stop


def test_completed_without_a_token_is_a_full_context():
    answer = turn("completed", [], [])
    assert (answer.token_ids, answer.stop) == ([], "length")


@pytest.mark.parametrize(("reason", "token_ids"), [("completed", [3, STOP]), ("aborted", [3]), ("completed", [])])
def test_tokens_without_log_probabilities_are_our_own_mistake(reason: str, token_ids: list[int]):
    with pytest.raises(AssertionError, match="no logprobs although they were asked for"):
        turn(reason, token_ids, None)
