"""One trajectory: model turn, interpreter, model turn, ... on any engine, sandbox, protocol.

``converse`` is the only tool loop. It drives a ``Conversation``: in tokens for training, validation
and an evaluation on SGLang, in text for a model behind an API.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.rollout import hooks
from retool_mcore.rollout.calls import CallResult, Calls
from retool_mcore.rollout.engine import Engine, EngineTurn, EngineUnavailable, Sampling, TurnRequest
from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.protocol import ToolProtocol
from retool_mcore.rollout.tool_call import Parsed
from retool_mcore.rollout.tools import Given
from retool_mcore.sandbox.base import Sandbox

MAX_ABORTS = 600  # interruptions of one turn without a sampled token, one second apart; a weight update takes less time
ABORT_PAUSE_S = 1.0
MIN_TURN_TOKENS = 2  # a token and the closing one; a result is not written when no turn could follow it


@dataclass(kw_only=True)
class Turn:
    """One model turn: its text, its start among the response tokens, and its calls' results."""

    start: int
    tokens: int
    text: str
    parsed: Parsed | None  # None: the budget cut the turn off before it could be read
    answer: str | None  # what the turn boxed, if it holds no call
    results: list[CallResult] = field(default_factory=list[CallResult])
    engine_s: float = 0.0
    tool_s: float = 0.0

    @property
    def void(self) -> bool:
        """Whether it has neither a call that can be read nor an answer (SimpleTIR's void turn)."""
        calls = self.parsed is not None and self.parsed.kind == "tool_call"
        return not calls and self.answer is None


@dataclass(kw_only=True)
class Trajectory:
    """A finished trajectory.

    ``drop_error`` names the outage that dropped it; a dropped trajectory is never trained on.
    ``found`` is what its tools' ends returned, and ``faults`` counts those of their hooks.
    ``context_tokens`` counts the tokens sent to the engine over all requests, and ``cached_tokens``
    those of them in its prefix cache; both leave out requests whose answer does not report the
    cache. ``requests`` counts all of them.
    """

    ledger: Ledger
    turns: list[Turn] = field(default_factory=list[Turn])
    drop_error: str | None = None
    started_unix_s: float = 0.0  # seconds since 1970
    wall_s: float = 0.0
    context_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    found: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    faults: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def stop_reason(self) -> StopReason:
        assert self.ledger.stop_reason is not None, "the trajectory is still running"
        return self.ledger.stop_reason

    @property
    def dropped(self) -> bool:
        return self.stop_reason == StopReason.DROPPED

    @property
    def answer(self) -> str | None:
        """What the last turn boxed, or None: the answer that the reward judges."""
        return self.turns[-1].answer if self.turns else None

    @property
    def has_void_turn(self) -> bool:
        return any(turn.void for turn in self.turns)

    @property
    def engine_s(self) -> float:
        return sum(turn.engine_s for turn in self.turns)

    @property
    def tool_s(self) -> float:
        return sum(turn.tool_s for turn in self.turns)


async def run_trajectory(
    prompt_ids: Sequence[int],
    *,
    engine: Engine,
    sandbox: Sandbox | None,
    protocol: ToolProtocol,
    limits: Limits,
    sampling: Sampling,
    trajectory_id: str,
    given: Given | None = None,
) -> Trajectory:
    """Sample one trajectory from prompt_ids [T] to its end.

    ``given``: what the run's own tools see of the row.
    ``sandbox`` may be None for a text-only protocol. Never raises for what the model does, nor for
    an outage of sandbox or engine: such an outage returns the trajectory as dropped.
    """
    assert prompt_ids, "a trajectory starts from at least one prompt token"
    trajectory = Trajectory(ledger=Ledger(prompt_ids, limits.max_response_tokens))
    conversation = _TokenConversation(trajectory, engine, protocol, sampling, trajectory_id)
    given = replace(given or Given(), trajectory_id=trajectory_id, sandbox=sandbox)
    return await converse(trajectory, conversation, Calls(protocol, limits, given), limits)


class OutOfRoom(Exception):
    """No further turn fits into the response's budget or into the model's context."""


class Conversation(Protocol):
    """The model's side of one trajectory: in tokens here, in text in evaluate/endpoint.py."""

    async def next_turn(self) -> Turn:
        """Sample the model's next turn; its ``parsed`` is None if the budget cut it off.

        Raises OutOfRoom, and EngineUnavailable for an outage.
        """
        ...

    def write(self, results: Sequence[str]) -> None:
        """Show the model what its last turn's calls returned. Raises OutOfRoom."""
        ...


async def converse(trajectory: Trajectory, model: Conversation, calls: Calls, limits: Limits) -> Trajectory:
    """Alternate model turns and calls until the trajectory ends; an outage drops it."""
    trajectory.started_unix_s, started = time.time(), time.perf_counter()
    with hooks.counting() as faults:
        try:
            reason = await _alternate(trajectory, model, calls, limits)
        except OutOfRoom:
            reason = StopReason.NO_ROOM
        except (SandboxUnavailable, EngineUnavailable) as error:
            trajectory.drop_error = f"{type(error).__name__}: {error}"
            reason = StopReason.DROPPED
        finally:
            await calls.close()
    trajectory.found, trajectory.faults = calls.found, dict(faults)
    trajectory.ledger.close(reason)
    trajectory.wall_s = time.perf_counter() - started
    return trajectory


async def _alternate(trajectory: Trajectory, model: Conversation, calls: Calls, limits: Limits) -> StopReason:
    malformed_in_a_row = 0
    while True:
        started = time.perf_counter()
        turn = await model.next_turn()
        turn.engine_s = time.perf_counter() - started
        trajectory.turns.append(turn)
        if turn.parsed is None:
            return StopReason.LENGTH
        if turn.parsed.kind in ("answer", "text"):
            return StopReason.FINISHED
        malformed_in_a_row = malformed_in_a_row + 1 if turn.parsed.kind == "malformed" else 0
        if malformed_in_a_row >= limits.max_malformed_calls:
            return StopReason.MALFORMED
        if len(trajectory.turns) >= limits.max_turns:
            return StopReason.TURNS
        results = await _results(turn, turn.parsed, calls)
        if sum(result.run_s for each in trajectory.turns for result in each.results) >= limits.max_tool_s:
            return StopReason.TOOL_TIME
        model.write(results)


async def _results(turn: Turn, parsed: Parsed, calls: Calls) -> list[str]:
    """The texts that answer a turn: each call's output, or why the calls cannot be read."""
    if parsed.kind == "malformed":
        return [calls.shown(f"Error: {parsed.error}")]
    started = time.perf_counter()
    turn.results.extend(await calls.run(parsed.calls))
    turn.tool_s = time.perf_counter() - started
    return [result.shown for result in turn.results]


class _TokenConversation:
    """A conversation in tokens, each of which is in the trajectory's ledger."""

    def __init__(
        self, trajectory: Trajectory, engine: Engine, protocol: ToolProtocol, sampling: Sampling, trajectory_id: str
    ) -> None:
        self.trajectory, self.engine, self.protocol = trajectory, engine, protocol
        self.sampling, self.trajectory_id = sampling, trajectory_id
        self._stops = frozenset(protocol.stop_token_ids)
        self._turn_ids: list[int] = []

    async def next_turn(self) -> Turn:
        ledger = self.trajectory.ledger
        start = len(ledger.response_ids)
        complete, empty_aborts = False, 0
        while not complete and ledger.budget_tokens > 0:
            sampled = await self._sample(start)
            if not sampled.token_ids and sampled.stop == "abort":
                empty_aborts += 1
                if empty_aborts > MAX_ABORTS:
                    raise EngineUnavailable(f"the engine aborted {empty_aborts} times without sampling a token")
                await asyncio.sleep(ABORT_PAUSE_S)
            elif not sampled.token_ids and not ledger.response_ids:
                raise EngineUnavailable(f"the engine ended ({sampled.stop}) without sampling a token")
            elif sampled.stop == "length":
                break
            # Otherwise continue: after an abort, or after a token that only looked like a call's
            # end.
            complete = sampled.stop == "stop" and self.protocol.ended(ledger.response_ids[start:])
        self._turn_ids = turn_ids = ledger.response_ids[start:]
        text = self.protocol.text(turn_ids)
        parsed = self.protocol.read(turn_ids, text) if complete else None
        prediction = parsed.answer if parsed else self.protocol.answer(text)
        return Turn(start=start, tokens=len(turn_ids), text=text, parsed=parsed, answer=prediction)

    def write(self, results: Sequence[str]) -> None:
        ledger = self.trajectory.ledger
        result_ids = self.protocol.result_ids(self._turn_ids, results)
        if len(result_ids) + MIN_TURN_TOKENS > ledger.budget_tokens:
            raise OutOfRoom
        ledger.append_tool(result_ids)

    async def _sample(self, start: int) -> EngineTurn:
        """Sample what the turn that began at response token ``start`` still lacks."""
        ledger = self.trajectory.ledger
        request = TurnRequest(
            token_ids=ledger.context,
            max_new_tokens=ledger.budget_tokens,
            stop_token_ids=self.protocol.stop_token_ids,
            sampling=self.sampling,
            trajectory_id=self.trajectory_id,
            call_end=self.protocol.call_end,
            turn_tokens=len(ledger.response_ids) - start,
        )
        self.trajectory.requests += 1
        sampled = self._cut_at_its_end(await self.engine.generate(request), ledger.response_ids[start:])
        if sampled.cached_tokens is not None:
            self.trajectory.context_tokens += len(request.token_ids)
            self.trajectory.cached_tokens += sampled.cached_tokens
        if sampled.token_ids:
            ledger.append_model(
                sampled.token_ids, sampled.logprobs, version=sampled.version, context_tokens=sampled.context_tokens
            )
            if sampled.routes is not None:
                ledger.append_routes(sampled.routes)
        return sampled

    def _cut_at_its_end(self, sampled: EngineTurn, before: list[int]) -> EngineTurn:
        """``sampled`` up to the end of the turn, whose tokens ``before`` were sampled earlier.

        A step of speculative decoding has several tokens. SGLang looks for stop tokens only in a
        step that does not reach the limit of the request; in the last one a stop may be passed.
        """
        stops = self._stops
        found = [at for at, token_id in enumerate(sampled.token_ids[:-1], len(before) + 1) if token_id in stops]
        turn_ids = [*before, *sampled.token_ids] if found else []
        for position in found:
            if self._ended(turn_ids, position):
                assert sampled.stop == "length", "the engine sampled past a stop token"
                kept, past = position - len(before), len(turn_ids) - position
                routes = None if sampled.routes is None else sampled.routes[:-past]
                cut = {"token_ids": sampled.token_ids[:kept], "logprobs": sampled.logprobs[:kept], "routes": routes}
                return replace(sampled, stop="stop", **cut)
        return sampled

    def _ended(self, turn_ids: list[int], position: int) -> bool:
        """Whether the turn is over at ``position``, behind a stop token."""
        call_end = self.protocol.call_end
        if call_end is not None and turn_ids[position - 1] in call_end.completing:
            last = turn_ids[max(0, position - call_end.max_tokens) : position]
            if not call_end.complete(last):  # most such tokens complete nothing, and the last few tell
                return False
        return self.protocol.ended(turn_ids[:position])
