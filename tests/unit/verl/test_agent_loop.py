"""What our agent loop hands to verl's client, to the sandbox and to verl, each at its place."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms.call_end import TABLE, TURN_TOKENS
from retool_mcore.rollout.engine import Sampling, TurnRequest, trajectory_seed
from retool_mcore.rollout.ledger import StopReason
from tests.unit.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
STOP = 7
REQUEST = TurnRequest(
    token_ids=[1, 2], max_new_tokens=8, stop_token_ids=[STOP, 9], trajectory_id="of this one", turn_tokens=1,
    call_end=cast("Any", SimpleNamespace(as_json="a table")),
    sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=11),
)  # fmt: skip


def turn(reason: str, token_ids: list[int], log_probs: list[float] | None, *how: Any, **seeds: Any) -> list[Any]:
    """The turn that our engine makes of this answer of verl's client, and what it asked for."""
    from verl.workers.rollout.replica import TokenOutput

    from retool_mcore.verl.agent_loop import VerlEngine

    extra = {"min_global_steps": 3, "max_global_steps": 5, "num_cached_tokens": 2}
    answer = TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason=reason, extra_fields=extra)
    client = mock.AsyncMock(**{"generate.return_value": answer})
    return [asyncio.run(VerlEngine(client, *how, **seeds).generate(REQUEST)), client.generate.call_args.kwargs]


def test_a_request_has_each_number_under_its_own_name():
    answer, asked = turn("stop", [STOP], [-0.5], {"top_k": 50, "min_p": 0.1}, request_seeds=True)
    assert (answer.version, answer.cached_tokens, answer.stop) == (5, 2, "stop"), "what a turn ended with"
    params = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.0, "logprobs": True, "max_new_tokens": 8}
    params |= {"stop_token_ids": [STOP, 9], "top_k": 40}
    more = {"top_k": 50, "min_p": 0.1, "sampling_seed": 11, "custom_params": {TABLE: "a table", TURN_TOKENS: 1}}
    request = {"request_id": "of this one", "prompt_ids": [1, 2]}
    assert asked == {**request, "sampling_params": params | more}
    assert turn("stop", [STOP], [-0.5])[1] == {**request, "sampling_params": params}


@pytest.mark.parametrize(
    ("nodes", "processes", "of_node", "of_process"),
    [
        (1, 4, {"workers": 16, "sessions": 12}, (4, 4)),
        (1, 8, {"workers": 4, "sessions": 0}, (1, 0)),
        (2, 5, {"workers": 16, "sessions": 40}, (5, 13)),  # the node of three has no more than the node of two
    ],
)
def test_a_nodes_processes_share_its_interpreters_and_its_sessions(
    nodes: int, processes: int, of_node: dict[str, Any], of_process: Any, monkeypatch: pytest.MonkeyPatch
):
    """Workers and sessions: at least one of the first, and never fewer of the second than of it."""
    from retool_mcore.verl import agent_loop

    rollout = SimpleNamespace(tool=True, agent_workers=processes)
    sandbox = load_config(RlConfig, RL).sandbox.model_copy(
        update=of_node | {"min_level": "none", "python": "of the model"}
    )
    config = SimpleNamespace(cluster=SimpleNamespace(nodes=nodes), rollout=rollout, sandbox=sandbox)
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(agent_loop, "settings_of_run", lambda path: config)
    monkeypatch.setattr(agent_loop, "open_sandbox", lambda where, **how: opened.append(how))
    agent_loop.sandbox_of.__wrapped__("config.toml")
    assert (opened[0]["workers"], opened[0]["sessions"]) == of_process
    assert (opened[0]["min_level"], opened[0]["python"]) == ("none", "of the model")


@pytest.mark.parametrize(
    ("reason", "token_ids", "log_probs", "stop"),
    [
        ("abort", [], None, "abort"),  # vLLM, for a request that a weight sync aborted before its first token
        ("aborted", [3, 5], [-0.5, -1.0], "abort"),
        ("abort", [3, STOP], [-0.5, -1.0], "abort"),
        ("completed", [3, STOP], [-0.5, -1.0], "stop"),  # vLLM's only word; the last token decides
        ("completed", [3, 5], [-0.5, -1.0], "length"),
        ("length", [3, STOP], [-0.5, -1.0], "length"),
        ("stop", [3, STOP], [-0.5, -1.0], "stop"),
    ],
)
def test_a_turn_keeps_its_tokens_and_why_it_stopped(
    reason: str, token_ids: list[int], log_probs: list[float] | None, stop: str
):
    answer, _ = turn(reason, token_ids, log_probs)
    assert (answer.token_ids, answer.logprobs, answer.stop) == (token_ids, log_probs or [], stop)


def test_a_held_out_row_has_the_seed_of_an_evaluation_and_each_step_another():
    from retool_mcore.verl.agent_loop import _seed

    row = {"row": 4, "session_id": 2, "held_out": True, "global_steps": 3}
    assert _seed(7, row) == _seed(7, row | {"global_steps": 9}) == trajectory_seed(7, 4, 2)
    others = [row | {"held_out": False} | changed for changed in ({}, {"row": 2, "session_id": 4}, {"global_steps": 9})]
    assert len({_seed(7, row), _seed(8, row), *(_seed(7, other) for other in others)}) == 5


def test_a_response_that_found_no_room_is_truncated_too():
    from retool_mcore.verl.agent_loop import is_masked

    algorithm = load_config(RlConfig, RL, ['algorithm.mask=["truncated"]']).algorithm
    row: Any = SimpleNamespace(has_void_turn=False)
    masked = [row.stop_reason for row.stop_reason in StopReason if is_masked(algorithm, row)]
    assert masked == [StopReason.LENGTH, StopReason.NO_ROOM]


def test_a_tool_gets_the_rows_truth_source_and_other_columns():
    from retool_mcore.rollout.tools import ToolContext
    from retool_mcore.verl.agent_loop import _tool_context

    row = {"reward_model": {"ground_truth": 34}, "data_source": "mine", "extra_info": {"index": 5}}
    assert _tool_context(row) == ToolContext(truth="34", data_source="mine", extra_info={"index": 5})
    assert _tool_context({}) == ToolContext(truth="", data_source="", extra_info={})


def test_errors_that_verl_only_logs_are_counted_once_by_their_first_cause(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import RayTaskError

    from retool_mcore.verl import agent_loop

    of_reward = RayTaskError("score", "the worker's traceback", ValueError("no truth")).as_instanceof_cause()
    monkeypatch.setattr(agent_loop, "drop_causes", Counter())
    handler, pop = agent_loop.DropCauseHandler(), cast("Any", agent_loop.LoopWorker.pop_drop_causes)
    for error in (KeyError("a"), None, KeyError("a"), of_reward):
        handler.emit(logging.makeLogRecord({"exc_info": error and (type(error), error, None)}))
    assert [asyncio.run(pop(None)) for _ in range(2)] == [{"KeyError: 'a'": 2, "ValueError: no truth": 1}, {}]
