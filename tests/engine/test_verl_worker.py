"""verl's own agent-loop worker on our resolved tree: what the engine is asked for, and what is
stored of the answers.

The client of the rollout servers and the sandbox are scripts, and there is neither a queue nor a
reward.
"""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.platforms import get_platform
from retool_mcore.rollout.engine import trajectory_seed
from retool_mcore.run import heartbeat
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.keys.tree import ppo_tree
from tests.plain_chatml import with_template
from tests.unit.rollout.scripted_engine import ABORT, Prints, ScriptedEngine, call
from tests.unit.rollout.test_tools import ask

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

RL = Path(__file__).parents[2] / "configs" / "rl_tiny_cpu.toml"
CALL, ANSWER = "I add.\n" + call("print(412 + 967)"), "It is \\boxed{1379}.<|im_end|>"


class Client:
    """verl's LLMServerClient: each token has its own log-probability, by its id, and its own
    experts, its position and the version of the weights, so that none is unseen in another's place.
    """

    def __init__(self, tokenizer: Any, script: list[str], *, dies: bool) -> None:
        self.tokenizer, self.script, self.dies = tokenizer, script, dies
        self.engines, self.asked = dict[str, ScriptedEngine](), list[dict[str, Any]]()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        from ray.exceptions import ActorDiedError
        from verl.workers.rollout.replica import TokenOutput

        if self.dies:
            raise ActorDiedError()
        self.asked.append(sampling_params)
        engine = self.engines.setdefault(request_id, ScriptedEngine(self.tokenizer, self.script))
        turn = await engine.answer(request_id, prompt_ids, sampling_params)
        known = len(prompt_ids) + len(turn.token_ids) - 1
        extra = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 3 + turn.version)
        return TokenOutput(
            token_ids=list(turn.token_ids),
            log_probs=[logprob_of(token_id) for token_id in turn.token_ids],
            routed_experts=np.array([[[position, turn.version]] for position in range(known)], np.int32),
            stop_reason=turn.stop,
            extra_fields={**extra, "num_cached_tokens": 16},
        )


def logprob_of(token_id: int) -> float:
    return -(token_id + 1) / 1024


@pytest.fixture
def sampled(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    """What verl's worker stores of one prompt, and the parameters of each request for it."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from retool_mcore.verl import agent_loop as ours

    class Worker(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class):
        def __init__(self, tree: Any, client: Client) -> None:
            """Leave out the queue and the model files with the base class's tokenizer."""
            self.config, self.llm_client, self.background_tasks = tree, client, set()
            self.rollout_config = tree.actor_rollout_ref.rollout
            self.tokenizer, self.processor, self.hf_model_type = client.tokenizer, None, "qwen2"
            self.dataset_cls, self.tools, self.stored = RLHFDataset, [], []

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
            outputs = output if isinstance(output, list) else [output]
            self.stored += [{**each.as_dict(), "metrics": each.metrics} for each in outputs]

        async def generate(self, prompts: Any) -> None:
            await self.generate_sequences(prompts)
            await asyncio.gather(*self.background_tasks)

    async def put(**_: Any) -> None: ...

    def sample(
        config: RlConfig, *script: str, dies: bool = False, template: str = "", held_out: bool = False, **row: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        config.run.dir.mkdir(parents=True, exist_ok=True)
        write_settings(config)
        tree = ppo_tree(config, get_platform("cpu"))
        for entry in OmegaConf.load(tree.actor_rollout_ref.rollout.agent.agent_loop_config_path):
            monkeypatch.setitem(agent_loop._agent_loop_registry, entry.name, entry)
        prompts = tu.get_tensordict(
            tensor_dict={
                "index": torch.tensor([0]),
                "row": torch.tensor([row.get("row", 4)]),
                "held_out": torch.tensor([held_out]),
            },
            non_tensor_dict={"global_steps": row.get("step", 2), "validate": held_out},
        )
        tu.assign_non_tensor_stack(prompts, "uid", ["u"])
        tu.assign_non_tensor_stack(prompts, "reward_model", [{"ground_truth": "1379"}])
        tu.assign_non_tensor_stack(prompts, "raw_prompt", [[{"role": "user", "content": "What is 412 + 967?"}]])
        model = with_template(tokenizer, template) if template else tokenizer
        worker = Worker(tree, Client(model, list(script or (CALL, ANSWER)), dies=dies))
        asyncio.run(worker.generate(prompts))
        return worker.stored, worker.llm_client.asked

    monkeypatch.setattr(agent_loop_tq, "tq", SimpleNamespace(async_kv_put=put))
    monkeypatch.setattr(ours, "sandbox_of", lambda _: Prints(["1379\n"] * 99))  # a real one takes seconds to start
    return sample


def rl(tmp_path: Path, *settings: str) -> RlConfig:
    small = ("rollout.max_response_tokens=400", "data.max_prompt_tokens=300", "train.prompts_per_step=8")
    more = ("train.mini_batch_prompts=8", "rollout.group_size=2", f"run.root={tmp_path}")
    return load_config(RlConfig, RL, [*small, *more, *settings])


def test_a_validation_gets_its_own_sampling(sampled, tmp_path: Path):
    """Not as training does, whose temperature and group size are other ones."""
    own = ("validation.temperature=0.3", "validation.top_p=0.8", "validation.n=3")
    stored, asked = sampled(rl(tmp_path, "rollout.temperature=0.7", *own), held_out=True)
    assert len(stored) == 3 and len(asked) == 2 * 3
    assert {(params["temperature"], params["top_p"]) for params in asked} == {(0.3, 0.8)}


def test_every_turn_of_a_trajectory_has_its_seed(sampled, tmp_path: Path):
    def seeds(**row: Any) -> list[int]:
        """Of each trajectory of the prompt."""
        _, asked = sampled(rl(tmp_path, "validation.n=3"), **row)
        turns = Counter(params["sampling_seed"] for params in asked)
        assert set(turns.values()) == {2}
        return [*turns]

    assert len({*seeds(), *seeds(step=3), *seeds(row=5)}) == 6
    of_evaluation = [trajectory_seed(0, 4, sample) for sample in range(3)]
    assert seeds(held_out=True) == seeds(held_out=True, step=3) == of_evaluation


def test_each_token_and_each_number_is_stored_in_its_place(sampled, tokenizer, tmp_path: Path):
    (row, *_), _ = sampled(config := rl(tmp_path))
    prompt, responses, mask = (row[name].tolist() for name in ("prompts", "responses", "response_mask"))
    turns = [tokenizer.encode(turn, add_special_tokens=False) for turn in (CALL, ANSWER)]
    assert [token for token, loss in zip(responses, mask, strict=True) if loss] == [*turns[0], *turns[1]]
    assert 0 in mask, "the interpreter's result stands between the turns"
    expected = [logprob_of(token) if loss else 0.0 for token, loss in zip(responses, mask, strict=True)]
    assert row["rollout_log_probs"].tolist() == expected
    assert "routed_experts" not in row, "no router replay"
    assert row["num_turns"] == 4, "verl's count: the question, two of the model, one of the interpreter"
    extra, behavior = row["extra_fields"], row["extra_fields"]["behavior"]
    assert (extra["min_global_steps"], extra["max_global_steps"], extra["answer"]) == (3, 3, "1379")
    assert extra["row"] == 4, "the curriculum counts answers by row"
    assert (behavior["calls"], behavior["stop_reason"]) == (1, "finished")
    assert extra["record"]["turns"][0]["results"][0]["shown"] == "1379"
    assert extra["record"]["versions"] == [3 if loss else -1 for loss in mask]
    metrics = row["metrics"]
    assert (metrics.generate_sequences, metrics.tool_calls) == (behavior["engine_s"], behavior["tool_s"])
    sent = 2 * len(prompt) + len(responses) - len(turns[1])
    assert (behavior["context_tokens"], behavior["cached_tokens"]) == (sent, 2 * 16)
    assert (config.run.dir / heartbeat.FILE).exists(), "the watchdog sees that the run samples"


def test_an_own_tool_knows_the_row(sampled, tmp_path: Path):
    config = rl(tmp_path, 'rollout.tools=["tests.unit.evaluate.test_endpoint:Known"]')
    (row, *_), _ = sampled(config, ask("known"), ANSWER)
    assert row["extra_fields"]["record"]["turns"][0]["results"][0]["shown"] == "it is 1379"


def test_an_outage_stores_nothing_and_is_counted_once(sampled, tmp_path: Path):
    from retool_mcore.verl.agent_loop import LoopWorker

    assert sampled(rl(tmp_path), dies=True) == ([], [])
    pop: Any = LoopWorker.pop_drop_causes
    [(cause, count)] = asyncio.run(pop(None)).items()
    assert "ActorDiedError" in cause and count == 2
    assert asyncio.run(pop(None)) == {}


def test_tokens_keep_the_weights_and_the_experts_of_before_a_sync_that_interrupts_their_turn(sampled, tmp_path: Path):
    """Two updates: one before the call, one in the answer. After each, the engine reports the
    experts of all tokens again.
    """
    script = (CALL.replace("<tool", f"{ABORT}<tool"), ANSWER[:6] + ABORT + ANSWER[6:])
    (row, *_), _ = sampled(rl(tmp_path, "algorithm.router_replay=R3"), *script)
    routes = [layers[0] for layers in row["routed_experts"].tolist()]
    prompt, tokens = len(row["prompts"]), len(row["prompts"]) + len(row["responses"])
    assert [position for position, _ in routes[:-1]] == list(range(tokens - 1))
    assert routes[-1] == [0, 0], "verl fills up for the last token, whose experts it does not repeat"
    reported = [version for _, version in routes[:-1]]
    assert reported == sorted(reported) and set(reported) == {0, 1, 2}
    extra = row["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (3, 5)
    versions = extra["record"]["versions"]
    sampled_by = [version for version in versions if version >= 0]
    assert sampled_by == sorted(sampled_by) and set(sampled_by) == {3, 4, 5}
    # A token's experts are reported with the next token, so by the same weights or later ones.
    for version, of_experts in zip(versions[:-1], reported[prompt:], strict=True):
        assert version <= 3 + of_experts


def test_a_template_with_todays_date_writes_the_day_of_the_run(sampled, tokenizer, tmp_path: Path):
    config = rl(tmp_path)
    config.run.dir.mkdir()
    (config.run.dir / FORMAT_FILE).write_text('{"date": "2024-02-03"}')
    (row, *_), _ = sampled(config, template='{{ strftime_now("%d %b %Y") }}' + tokenizer.chat_template)
    assert tokenizer.decode(row["prompts"]).startswith("03 Feb 2024<|im_start|>")


def test_the_sandbox_has_the_interpreter_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import agent_loop

    config = rl(tmp_path, "sandbox.python=/opt/own/bin/python", 'sandbox.preload=["wave"]')
    config.run.dir.mkdir()
    write_settings(config)
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(agent_loop, "open_sandbox", lambda where, **how: opened.append(how))
    agent_loop.sandbox_of.__wrapped__(str(config.run.config_file))
    assert (opened[0]["python"], opened[0]["preload"]) == ("/opt/own/bin/python", config.sandbox.preload)


MASKED_BY = {  # the model's turns and the settings that leave the response out
    "answered": ([CALL, ANSWER], set()),
    "void at the end": ([CALL, "I do not know.<|im_end|>"], {"void_turns"}),
    "cut": ([CALL, "a longer thought " * 90 + ANSWER], {"truncated", "void_turns"}),
}


@pytest.mark.parametrize("case", MASKED_BY)
def test_a_response_that_a_setting_leaves_out_has_no_token_in_the_loss(sampled, tmp_path: Path, case: str):
    """SimpleTIR, arXiv 2509.02479, Sec. 3.2, for void turns; DAPO, arXiv 2503.14476, Sec. 3.4."""
    script, masked_by = MASKED_BY[case]
    for kind in ("truncated", "void_turns"):
        config = rl(tmp_path / kind, f'algorithm.mask=["{kind}"]')
        (row, *_), _ = sampled(config, *script)
        mask = row["response_mask"].tolist()
        assert len(mask) == len(row["responses"]) == len(row["rollout_log_probs"])
        assert (1 in mask) == (kind not in masked_by), kind
    (row, *_), _ = sampled(config, *script, held_out=True)
    assert 1 in row["response_mask"].tolist(), "a validation leaves out none"
