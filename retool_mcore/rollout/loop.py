"""The multi-turn tool loop: the model samples a turn, tools run its calls, the model continues.

``run_trajectory`` samples one trajectory from any engine, with any sandbox and tool protocol.
``converse`` is the loop itself. Training, validation and evaluation on SGLang run it on token ids
(``_TokenConversation``); evaluation of a model behind a chat API runs it on text
(evaluate/endpoint.py).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.calls import CallResult, Calls
from retool_mcore.rollout.engine import Engine, EngineTurn, EngineUnavailable, Sampling, TurnRequest
from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.protocol import ToolProtocol
from retool_mcore.rollout.tool_call import Parsed
from retool_mcore.rollout.tools import ToolContext, ToolFailed
from retool_mcore.sandbox.base import Sandbox

MAX_ABORTS = 600  # aborts of one turn that yield no token, ABORT_PAUSE_S apart; a weight sync takes less than 600 s
ABORT_PAUSE_S = 1.0
MIN_TURN_TOKENS = 2  # one token and the end-of-turn token: the least budget that must remain after a tool result


@dataclass(kw_only=True)
class Turn:
    """One model turn and the results of its calls.

    ``start`` is its offset in the response tokens, ``tokens`` its length. ``engine_s`` and
    ``tool_s`` are the seconds spent waiting for the engine and for the tools.
    """

    start: int
    tokens: int
    text: str
    parsed: Parsed | None  # None: the token budget cut the turn off
    answer: str | None  # the content of \boxed{}, if the turn contains no call
    results: list[CallResult] = field(default_factory=list[CallResult])
    engine_s: float = 0.0
    tool_s: float = 0.0

    @property
    def void(self) -> bool:
        """Whether the turn has neither a valid call nor an answer (SimpleTIR's void turn)."""
        calls = self.parsed is not None and self.parsed.kind == "tool_call"
        return not calls and self.answer is None


@dataclass(kw_only=True)
class Trajectory:
    """A trajectory and its statistics, complete when ``converse`` returns it.

    ``drop_error``: the outage or the tool's exception that dropped the trajectory. Training skips
    dropped trajectories.
    ``tool_numbers``: the numbers that each tool's ``end`` hook returned, by tool name.
    ``faults``: the number of exceptions in tool hooks, by "TOOL.HOOK/EXCEPTION".
    ``requests``: requests to the engine; more than turns only after aborts or after stop tokens
    that completed no call.
    ``context_tokens``: context tokens sent to the engine, summed over requests.
    ``cached_tokens``: those that hit the engine's prefix cache. Neither sum includes requests whose
    response lacks a cache count.
    """

    ledger: Ledger
    turns: list[Turn] = field(default_factory=list[Turn])
    drop_error: str | None = None
    started_unix_s: float = 0.0  # seconds since 1970
    wall_s: float = 0.0
    context_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    tool_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
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
        """The boxed answer in the last turn, or None. The reward function grades it."""
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
    tool_context: ToolContext | None = None,
) -> Trajectory:
    """Sample one trajectory from the prompt ``prompt_ids`` [T] until it stops.

    ``sandbox``: may be None for a text-only protocol.
    ``trajectory_id``: routes all turns to the same engine replica, and names the sandbox session.
    ``tool_context``: the part of the dataset row that user-defined tools may read.

    A model's mistake never raises. After an outage of the sandbox or the engine, the returned
    trajectory has ``StopReason.DROPPED``. Exceptions of a user-defined tool propagate, except
    ToolError, TimeoutError and SandboxUnavailable.
    """
    assert prompt_ids, "no prompt tokens: a trajectory needs at least one"
    trajectory = Trajectory(ledger=Ledger(prompt_ids, limits.max_response_tokens))
    conversation = _TokenConversation(trajectory, engine, protocol, sampling, trajectory_id)
    context = replace(tool_context or ToolContext(), trajectory_id=trajectory_id, sandbox=sandbox)
    calls = Calls(protocol.tools, protocol.render_output, limits, context)
    return await converse(trajectory, conversation, calls, limits)


class OutOfRoom(Exception):
    """The response budget or the model's context has no room for another turn."""


class Conversation(Protocol):
    """The model's side of one trajectory.

    ``_TokenConversation`` implements it on token ids, evaluate/endpoint.py on text.
    """

    async def next_turn(self) -> Turn:
        """Sample the model's next turn. ``parsed`` is None if the token budget cut the turn off.

        Raises OutOfRoom if no turn fits, EngineUnavailable for an outage.
        """
        ...

    def write(self, results: Sequence[str]) -> None:
        """Append the results of the last turn's calls to the context.

        Raises OutOfRoom if the results and a further turn do not fit.
        """
        ...


async def converse(trajectory: Trajectory, model: Conversation, calls: Calls, limits: Limits) -> Trajectory:
    """Alternate model turns and tool calls until the end. Outages and failing tools drop it."""
    trajectory.started_unix_s, started = time.time(), time.perf_counter()
    try:
        reason = await _alternate(trajectory, model, calls, limits)
    except OutOfRoom:
        reason = StopReason.NO_ROOM
    except (SandboxUnavailable, EngineUnavailable, ToolFailed) as error:
        trajectory.drop_error = f"{type(error).__name__}: {error}"
        reason = StopReason.DROPPED
    finally:
        await calls.close()
    trajectory.tool_numbers, trajectory.faults = calls.tool_numbers, calls.faults
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
        if sum(result.run_s for turn in trajectory.turns for result in turn.results) >= limits.max_tool_s:
            return StopReason.TOOL_TIME
        model.write(results)


async def _results(turn: Turn, parsed: Parsed, calls: Calls) -> list[str]:
    """The text to append after a turn: each call's output, or the parse error."""
    if parsed.kind == "malformed":
        return [calls.render_error(f"Error: {parsed.error}")]
    started = time.perf_counter()
    turn.results.extend(await calls.run(parsed.calls))
    turn.tool_s = time.perf_counter() - started
    return [result.shown for result in turn.results]


class _TokenConversation:
    """A conversation on token ids. Every token is appended to the trajectory's ledger."""

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
            # Otherwise keep sampling: the engine aborted, or the stop token completes no call.
            complete = sampled.stop == "stop" and self.protocol.ended(ledger.response_ids[start:])
        self._turn_ids = turn_ids = ledger.response_ids[start:]
        text = self.protocol.text(turn_ids)
        parsed = self.protocol.read(turn_ids, text) if complete else None
        answer = parsed.answer if parsed else last_answer(text)
        return Turn(start=start, tokens=len(turn_ids), text=text, parsed=parsed, answer=answer)

    def write(self, results: Sequence[str]) -> None:
        ledger = self.trajectory.ledger
        result_ids = self.protocol.result_ids(self._turn_ids, results)
        if len(result_ids) + MIN_TURN_TOKENS > ledger.budget_tokens:
            raise OutOfRoom
        ledger.append_tool(result_ids)

    async def _sample(self, start: int) -> EngineTurn:
        """Sample the rest of the turn that starts at response token ``start``."""
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
        sampled = self._cut_at_turn_end(await self.engine.generate(request), ledger.response_ids[start:])
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

    def _cut_at_turn_end(self, sampled: EngineTurn, before: list[int]) -> EngineTurn:
        """Cut ``sampled`` at the end of the turn. ``before``: the turn's earlier tokens.

        A speculative decoding step yields several tokens. SGLang does not look for stop tokens in
        the step that reaches max_new_tokens, so that step may contain tokens after a stop token.
        """
        stops = self._stops
        ends = [at for at, token_id in enumerate(sampled.token_ids[:-1], len(before) + 1) if token_id in stops]
        turn_ids = [*before, *sampled.token_ids] if ends else []
        for position in ends:
            if self._ended(turn_ids, position):
                assert sampled.stop == "length", "the engine sampled past a stop token"
                kept, past = position - len(before), len(turn_ids) - position
                routes = None if sampled.routes is None else sampled.routes[:-past]
                cut = {"token_ids": sampled.token_ids[:kept], "logprobs": sampled.logprobs[:kept], "routes": routes}
                return replace(sampled, stop="stop", **cut)
        return sampled

    def _ended(self, turn_ids: list[int], position: int) -> bool:
        """Whether the turn ends at ``position``, right after a stop token."""
        call_end = self.protocol.call_end
        if call_end is not None and turn_ids[position - 1] in call_end.completing:
            last = turn_ids[max(0, position - call_end.max_tokens) : position]
            if not call_end.complete(last):  # the usual case; avoids decoding the turn
                return False
        return self.protocol.ended(turn_ids[:position])
