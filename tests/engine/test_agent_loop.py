"""What verl gets from our agent loop: tokens, mask, log-probs and the keys of its metrics."""

from typing import Any

import pytest

from retool_mcore.rollout.engine import trajectory_seed
from tests.forked import run_scenario


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("tests.engine.agent_loop_scenario", tmp_path_factory.mktemp("runs"))


def test_the_reward_and_the_metrics_find_their_keys(outputs: dict[str, Any]):
    extra = outputs["tool"]["extra_fields"]
    assert outputs["tool"]["num_turns"] == 4  # verl's count: the question, two of the model, one of the interpreter
    assert (extra["min_global_steps"], extra["max_global_steps"], extra["answer"]) == (3, 3, "1379")
    assert (extra["behavior"]["calls"], extra["behavior"]["stop_reason"]) == (1, "finished")
    assert extra["record"]["turns"][0]["results"][0]["shown"] == "1379"
    assert extra["record"]["versions"] == [3 if loss else -1 for loss in outputs["tool"]["response_mask"]]
    assert extra["row"] == 4, "the curriculum counts answers by row"
    assert outputs["alive"], "the watchdog sees that the run samples"


def test_an_environment_knows_the_row_and_the_reward_what_it_found(outputs: dict[str, Any]):
    """The example of hidden tests: one of two is passed."""
    submitted = outputs["submitted"]
    assert (
        submitted["tool_numbers"] == {"submit": {"passed": 0.5, "submissions": 1.0}} and submitted["tool_faults"] == {}
    )
    assert (submitted["score"], submitted["acc"], submitted["reward_submissions"]) == (0.5, 0.0, 1.0)


def test_a_template_with_todays_date_writes_the_day_of_the_run(outputs: dict[str, Any]):
    assert outputs["dated"].startswith("03 Feb 2024<|im_start|>")


def test_calls_and_the_cache_are_measured_where_they_happen(outputs: dict[str, Any]):
    behavior = outputs["tool"]["extra_fields"]["behavior"]
    [call_s], [queue_s] = behavior["call_s"], behavior["call_queue_s"]
    [result] = outputs["tool"]["extra_fields"]["record"]["turns"][0]["results"]
    assert call_s >= queue_s + result["run_s"] > 0
    metrics = outputs["tool"]["metrics"]
    assert (metrics["generate_sequences"], metrics["tool_calls"]) == (behavior["engine_s"], behavior["tool_s"])
    second = outputs["turns"][1]
    sent = 2 * len(outputs["tool"]["prompts"]) + len(outputs["tool"]["responses"]) - len(second)
    assert (behavior["context_tokens"], behavior["cached_tokens"]) == (sent, 32)


def test_every_turn_of_a_trajectory_has_its_seed(outputs: dict[str, Any]):
    def seeds(name: str) -> set[int | None]:
        return {params.get("sampling_seed") for params in outputs[name]["params"]}

    trained = [seeds(name) for name in ("tool", "next step", "next sample", "next row")]
    assert all(len(each) == 1 for each in trained) and len(set().union(*trained)) == 4
    assert seeds("held out") == seeds("held out, later") == {trajectory_seed(0, 4, 0)}, "what `retool eval` gives it"
    assert seeds("vllm") == {None}, "its SamplingParams have no field of this name"


def test_an_outage_stores_nothing_and_a_prompt_over_the_budget_is_an_error(outputs: dict[str, Any]):
    assert outputs["dropped"] == []
    [cause], later = outputs["causes"]
    assert "ActorDiedError" in cause and later == [], "each cause is reported once"
    assert outputs["long"].startswith("DataError: ")
    assert "more than data.max_prompt_tokens = 160" in outputs["long"]


def test_each_token_keeps_the_experts_that_were_reported_first(outputs: dict[str, Any]):
    """A weight sync interrupts a turn. The engine then reports the experts of all tokens again."""
    stored = outputs["routes"]
    routes = [layers[0] for layers in stored["routes"]]
    tokens = len(stored["prompts"]) + len(stored["responses"])
    assert [position for position, _ in routes[:-1]] == list(range(tokens - 1))
    assert routes[-1] == [0, 0], "verl fills up for the last token, whose experts it does not repeat"
    versions = [version for _, version in routes[:-1]]
    assert versions == sorted(versions) and set(versions) == {0, 1, 2}
    assert outputs["no router replay"]["routes"] is None


def test_tokens_of_a_turn_that_a_sync_interrupted_have_the_weights_that_each_was_sampled_with(outputs: dict[str, Any]):
    """Two updates: one before the call, one in the answer."""
    stored = outputs["routes"]
    extra, prompt = stored["extra_fields"], len(stored["prompts"])
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (3, 5)
    sampled = [version for version in extra["record"]["versions"] if version >= 0]
    assert sampled == sorted(sampled) and set(sampled) == {3, 4, 5}
    reported = [layers[0][1] + 3 for layers in stored["routes"]]
    # A token's experts are reported with the next token, so by the same weights or later ones.
    assert all(
        version <= reported[prompt + at] for at, version in enumerate(extra["record"]["versions"][:-1]) if version >= 0
    )


def test_the_code_runs_in_the_interpreter_of_the_settings(outputs: dict[str, Any]):
    result = outputs["interpreter"]["extra_fields"]["record"]["turns"][0]["results"][0]
    assert result["shown"] == "True True"
