"""What each stop reason does to mask, answer and batch: ledger.StopReason has the table.

Changing one is a product decision.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.rollout.engine import EngineTurn, TurnRequest
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import Hermes, Retool, ToolProtocol, open_protocol
from retool_mcore.sandbox import open_sandbox
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import ABORT, ScriptedEngine, call, roll_out, shown
from tests.unit.rollout.test_tool_call import block

QUESTION = [{"role": "user", "content": "What is 412 + 967?"}]
ANSWER = "It is \\boxed{1379}.<|im_end|>"
BAD = "<tool_call>\nprint(1)\n</tool_call>"
LIMITS = limits_for(max_response_tokens=2000, run_timeout_s=5.0, memory_limit_mb=256)


async def play(
    tokenizer, sandbox, *script: str, limits: Limits = LIMITS, protocol: ToolProtocol | None = None
) -> Trajectory:
    protocol = protocol or Hermes(tokenizer)
    engine = ScriptedEngine(tokenizer, script)
    trajectory = await roll_out(protocol.prompt_ids(QUESTION), engine, sandbox, protocol, limits)
    final = trajectory.ledger.context
    for context in engine.contexts:
        assert final[: len(context)] == context, "the engine was sent what the ledger does not hold"
    return trajectory


def tool_text(tokenizer, trajectory: Trajectory) -> str:
    ledger = trajectory.ledger
    return tokenizer.decode([i for i, loss in zip(ledger.response_ids, ledger.loss_mask, strict=True) if not loss])


async def test_turns(tokenizer, sandbox):
    limits = replace(LIMITS, max_turns=2)
    trajectory = await play(tokenizer, sandbox, call("print(1)"), call("print(2)"), limits=limits)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.TURNS, None)
    assert shown(trajectory) == ["1"]
    assert trajectory.ledger.loss_mask[-1] == 1


async def test_malformed_calls(tokenizer, sandbox):
    trajectory = await play(tokenizer, sandbox, BAD, BAD, BAD)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.MALFORMED, None)
    assert tool_text(tokenizer, trajectory).count("Error: the call is not valid JSON") == 2
    trajectory = await play(tokenizer, sandbox, BAD, BAD, call("print(1)"), BAD, BAD, ANSWER)
    assert trajectory.stop_reason == StopReason.FINISHED, "never three in a row"


async def test_a_call_at_the_time_limit_is_an_observation(tokenizer, sandbox):
    limits = replace(LIMITS, run_timeout_s=0.5)
    trajectory = await play(tokenizer, sandbox, call("while True: pass"), ANSWER, limits=limits)
    [result] = trajectory.turns[0].results
    assert (result.ok, result.status, trajectory.stop_reason) == (False, "time_limit", StopReason.FINISHED)
    assert "time limit" in tool_text(tokenizer, trajectory)


async def test_all_calls_of_a_turn_run_concurrently_and_answer_in_order(tokenizer, sandbox):
    slow = call("import time\ntime.sleep(1.0)\nprint('slow')")
    quick = call("import time\ntime.sleep(0.9)\nprint('quick')")
    protocol = open_protocol("hermes", tokenizer, calls="all")
    trajectory = await play(tokenizer, sandbox, f"{slow}\n{quick}<|im_end|>", ANSWER, protocol=protocol)
    assert shown(trajectory) == ["slow", "quick"]
    between = tool_text(tokenizer, trajectory)
    assert between.index("slow") < between.index("quick")
    first = trajectory.turns[0]
    assert first.tool_s < sum(result.run_s for result in first.results), "one after the other takes longer"


async def test_the_calls_of_one_turn_run_in_their_order_in_a_session(tokenizer):
    protocol = open_protocol("hermes", tokenizer, calls="all")
    turn = call("import time; time.sleep(0.3); x = 1") + "\n" + call("x += 1") + "\n" + call("print(x)") + "<|im_end|>"
    async with open_sandbox("local", min_level="rlimits", workers=3, sessions=3) as sandbox:
        limits = replace(LIMITS, sessions=True)
        trajectory = await play(tokenizer, sandbox, turn, ANSWER, limits=limits, protocol=protocol)
    assert shown(trajectory) == ["", "", "2"]


PIECES = ["hm, ", call("print(1)"), call("1/0"), "<tool_call>\nno\n</tool_call>", ANSWER, "hm, " + ABORT]
PIECES += ["<|endoftext|>", "x" * 40]


@settings(max_examples=40)
@given(
    script=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), min_size=1, max_size=12),
    budget=st.integers(1, 400),
)
async def test_any_model_output_keeps_the_ledgers_invariants_and_ends(tokenizer, sandbox, script, budget):
    limits = replace(LIMITS, max_response_tokens=budget, max_turns=5)
    trajectory = await play(tokenizer, sandbox, *script, *["again " * 100] * 20, limits=limits)
    ledger = trajectory.ledger
    assert len(ledger.response_ids) <= budget
    assert ledger.loss_mask[-1] == 1
    assert len(trajectory.turns) == (ledger.turns + 1) // 2 <= 5


async def test_a_call_that_ends_in_the_last_step_of_a_request_is_run(tokenizer, sandbox):
    """SGLang looks for no stop in a step that reaches the limit, and may sample past one there."""
    protocol = Retool(tokenizer)
    called = tokenizer.encode(block("print(7)"), add_special_tokens=False)
    past = tokenizer.encode(" and so on. x > 3 and more of it, and more", add_special_tokens=False)

    class SeveralAtOnce:
        async def generate(self, request: TurnRequest) -> EngineTurn:
            ids = [*called, *past][: request.max_new_tokens]
            logprobs = [-0.5 - at for at in range(len(ids))]
            routes = np.arange(len(request.token_ids) + len(ids) - 1, dtype=np.int16).reshape(-1, 1, 1)
            return EngineTurn(token_ids=ids, logprobs=logprobs, stop="length", routes=routes)

    limits = limits_for(max_response_tokens=len(called) + len(past), run_timeout_s=5.0)
    trajectory = await roll_out(protocol.prompt_ids(QUESTION), SeveralAtOnce(), sandbox, protocol, limits)
    ledger, first = trajectory.ledger, trajectory.turns[0]
    assert (first.tokens, first.text) == (len(called), block("print(7)"))
    assert ledger.logprobs[: len(called)] == [-0.5 - at for at in range(len(called))]
    assert ledger.routes is not None
    assert ledger.routes[:, 0, 0].tolist() == list(range(len(ledger.context) - 1))
    assert [result.shown for result in first.results] == ["7"]


async def test_a_line_break_merged_into_the_tag_is_not_written_twice(merging_tokenizer, sandbox):
    called, answer = block("print(7)") + "\n", "So it is\n<answer>\n\\boxed{1379}\n</answer><|im_end|>"
    assert merging_tokenizer.decode(merging_tokenizer.encode(called, add_special_tokens=False)[-1:]) == ">\n"
    trajectory = await play(merging_tokenizer, sandbox, called, answer, protocol=Retool(merging_tokenizer))
    text = merging_tokenizer.decode(trajectory.ledger.response_ids)
    assert text == called + "<interpreter>\n7\n</interpreter>\n" + answer
