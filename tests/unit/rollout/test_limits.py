"""Each limit of a trajectory at its edge, from the run file to the sandbox and the engine."""

import asyncio
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.rollout.calls import CallResult
from retool_mcore.rollout.engine import EngineTurn, TurnRequest
from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import MIN_TURN_TOKENS, Trajectory
from retool_mcore.rollout.protocol import Hermes
from retool_mcore.rollout.records import record
from retool_mcore.sandbox.base import ExecResult
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import ScriptedEngine, call, roll_out, shown

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"
QUESTION = [{"role": "user", "content": "What is 412 + 967?"}]
ANSWER = "It is \\boxed{1379}.<|im_end|>"
CALL = call("print(412 + 967)")


class Recording:
    """A sandbox that prints 1379 after 0.1 s, reports these run times and records its arguments."""

    def __init__(self, *run_s: float, outages: int = 0) -> None:
        self.run_s, self.outages, self.received, self.ended = list(run_s), outages, [], []

    async def execute(self, code: str, **limits: Any) -> ExecResult:
        self.received.append(limits)
        if len(self.received) <= self.outages:
            raise SandboxUnavailable("no server at unix:///gone.sock")
        await asyncio.sleep(0.1)
        run_s = self.run_s.pop(0) if self.run_s else 0.0
        return ExecResult(status="finished", return_code=0, stdout="1379\n", stderr="", run_s=run_s, queue_s=0.25)

    async def end_session(self, session: str) -> None:
        self.ended.append(session)


class Slow(ScriptedEngine):
    async def generate(self, request: TurnRequest) -> EngineTurn:
        await asyncio.sleep(0.05)
        return await super().generate(request)


async def play(tokenizer: Any, sandbox: Recording, limits: Limits, *script: str) -> Trajectory:
    protocol = Hermes(tokenizer)
    return await roll_out(protocol.prompt_ids(QUESTION), Slow(tokenizer, script), sandbox, protocol, limits)


def limits_of(*settings: str) -> Limits:
    run = load_config(RlConfig, RL, settings)
    return Limits.of(run.rollout, run.sandbox)


@pytest.mark.parametrize(("room", "written"), [(0, True), (-1, False)])
async def test_a_result_is_written_when_it_and_the_shortest_turn_fit_to_the_token(tokenizer, room: int, written: bool):
    sampled = tokenizer.encode(CALL, add_special_tokens=False)
    result = Hermes(tokenizer).result_ids(sampled, ["1379"])
    limits = limits_for(max_response_tokens=len(sampled) + len(result) + MIN_TURN_TOKENS + room)
    shortest = "1<|im_end|>"
    assert len(tokenizer.encode(shortest, add_special_tokens=False)) == MIN_TURN_TOKENS
    trajectory = await play(tokenizer, Recording(), limits, CALL, shortest)
    ledger = trajectory.ledger
    if written:
        assert trajectory.stop_reason == StopReason.FINISHED
        assert ledger.budget_tokens == 0 and ledger.loss_mask.count(0) == len(result)
    else:
        assert trajectory.stop_reason == StopReason.NO_ROOM
        assert ledger.response_ids == sampled, "the result is not written, nor a part of it"
        assert shown(trajectory) == ["1379"], "the call has been executed"


@pytest.mark.parametrize(
    ("run_s", "reason", "answer"),
    [
        ((0.6, 0.3), StopReason.FINISHED, "1379"),
        ((0.6, 0.4), StopReason.TOOL_TIME, None),  # neither call alone is over the limit
    ],
)
async def test_tool_time_is_the_sum_of_all_turns(tokenizer, run_s: tuple[float, ...], reason: StopReason, answer: Any):
    sandbox = Recording(*run_s)
    limits = limits_for(max_response_tokens=2000, max_tool_s=1.0)
    trajectory = await play(tokenizer, sandbox, limits, CALL, CALL, ANSWER)
    assert (trajectory.stop_reason, trajectory.answer, len(sandbox.received)) == (reason, answer, 2)


@pytest.mark.parametrize(("sessions", "session"), [(0, None), (96, "t")])
async def test_the_sandbox_gets_the_limits_of_the_run_file(tokenizer, sessions: int, session: str | None):
    sandbox = Recording(0.5)
    settings = ("sandbox.run_timeout_s=7.5", "sandbox.memory_limit_mb=333", f"sandbox.sessions={sessions}")
    own = ("max_response_tokens=2000", "max_turns=4", "max_tool_output_tokens=3", "max_outage_s=9")
    limits = limits_of(*settings, *(f"rollout.{each}" for each in own))
    assert astuple(limits) == (2000, 4, 3, 3, 300.0, 7.5, 333, 9.0, sessions > 0), "as Limits lists them"
    trajectory = await play(tokenizer, sandbox, limits, CALL, ANSWER)
    [result], cut = trajectory.turns[0].results, "13\n[... 1 tokens cut here ...]\n9"
    assert replace(result, wall_s=0.0) == CallResult(
        code="print(412 + 967)", ok=True, shown=cut, cut_tokens=1, run_s=0.5, queue_s=0.25
    )
    assert result.wall_s >= 0.1
    assert sandbox.received == [{"run_timeout_s": 7.5, "memory_limit_mb": 333, "session": session}]
    assert sandbox.ended == ([session] if session else [])
    assert limits_of("sandbox.run_timeout_s=200").max_tool_s == 600.0, "in each of three turns"


def test_an_engine_that_continued_another_context_is_caught():
    with pytest.raises(AssertionError, match="continued 5 tokens"):
        Ledger([1, 2], 8).append_model([10], [-1.0], context_tokens=5)


async def test_an_outage_is_retried_and_then_drops_the_trajectory(tokenizer):
    limits = limits_for(max_response_tokens=2000, max_outage_s=2.0)
    trajectory = await play(tokenizer, Recording(outages=1), limits, CALL, ANSWER)
    assert (trajectory.stop_reason, shown(trajectory)) == (StopReason.FINISHED, ["1379"])
    dropped = await play(tokenizer, Recording(outages=99), replace(limits, max_outage_s=0.1), CALL, ANSWER)
    assert dropped.stop_reason == StopReason.DROPPED and all(dropped.ledger.loss_mask), "the model reads no outage"
    assert dropped.drop_error == "SandboxUnavailable: no server at unix:///gone.sock"


async def test_a_record_has_each_turn_and_where_its_time_went(tokenizer):
    began_s, script = time.time(), ["<tool_call>\nprint(1)\n</tool_call>", CALL, ANSWER]
    trajectory = await play(tokenizer, Recording(), limits_for(max_response_tokens=2000), *script)
    row, ids = record(trajectory), trajectory.ledger.response_ids
    turns = row.pop("turns")
    engine_s, tool_s = ([turn[name] for turn in turns] for name in ("engine_s", "tool_s"))
    assert min(engine_s) >= 0.05 and tool_s[1] >= 0.1 and tool_s == [0.0, trajectory.tool_s, 0.0]
    assert row["wall_s"] >= sum(engine_s) + sum(tool_s) and trajectory.engine_s == sum(engine_s)
    assert began_s <= row.pop("started_unix_s") <= time.time() - row.pop("wall_s") + 0.01
    assert row == {"stop_reason": "finished", "drop_error": None, "extracted": "1379"}
    tokens = [ids[turn["start"] :][: turn["tokens"]] for turn in turns]
    assert tokenizer.batch_decode(tokens) == script
    assert [turn["text"] for turn in turns] == [*script[:2], ANSWER.removesuffix("<|im_end|>")]
    kinds = [(turn["kind"], turn["error"] is None, len(turn["results"])) for turn in turns]
    assert kinds == [("malformed", False, 0), ("tool_call", True, 1), ("answer", True, 0)]
