"""verl's own agent-loop worker on our resolved tree: what the engine is asked for, and what is
stored of the answers.

The client of the rollout servers and the sandbox are scripts, and there is neither a queue nor a
reward.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.keys.tree import ppo_tree
from tests.unit.rollout.scripted_engine import Prints, ScriptedEngine, call

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

RL = Path(__file__).parents[2] / "configs" / "rl_tiny_cpu.toml"
TURNS = ["I add.\n" + call("print(412 + 967)"), "It is \\boxed{1379}.<|im_end|>"]


class Client:
    """verl's LLMServerClient: each token's log-probability is its own, by its id, so that none can
    stand in another's place unseen.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.engines, self.asked = tokenizer, dict[str, ScriptedEngine](), list[dict[str, Any]]()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append(sampling_params)
        engine = self.engines.setdefault(request_id, ScriptedEngine(self.tokenizer, TURNS))
        turn = await engine.answer(request_id, prompt_ids, sampling_params)
        logprobs = [logprob_of(token_id) for token_id in turn.token_ids]
        steps = {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
        return TokenOutput(
            token_ids=list(turn.token_ids), log_probs=logprobs, stop_reason=turn.stop, extra_fields=steps
        )


def logprob_of(token_id: int) -> float:
    return -(token_id + 1) / 1024


def sampled(config: RlConfig, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, *, validate: bool) -> tuple[Any, Any]:
    """What verl's worker stores of one prompt, and the parameters of each request for it."""
    from verl.experimental.agent_loop import agent_loop
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import RLHFDataset

    stored: list[dict[str, Any]] = []

    class Worker(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class):
        def __init__(self) -> None:
            """Leave out the queue and the model files with the base class's tokenizer."""
            self.config, self.llm_client, self.background_tasks = tree, Client(tokenizer), set()
            self.rollout_config = tree.actor_rollout_ref.rollout
            self.tokenizer, self.processor, self.hf_model_type = tokenizer, None, "qwen2"
            self.dataset_cls, self.tools = RLHFDataset, []

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
            stored.append(output.as_dict())

    async def put(**_: Any) -> None: ...

    async def run(worker: Any) -> None:
        await worker.generate_sequences(prompts)
        await asyncio.gather(*worker.background_tasks)

    config.run.dir.mkdir(parents=True, exist_ok=True)
    write_settings(config)
    tree = ppo_tree(config, get_platform("cpu"))
    from omegaconf import OmegaConf

    for entry in OmegaConf.load(tree.actor_rollout_ref.rollout.agent.agent_loop_config_path):
        monkeypatch.setitem(agent_loop._agent_loop_registry, entry.name, entry)
    monkeypatch.setattr(agent_loop_tq, "tq", SimpleNamespace(async_kv_put=put))
    from retool_mcore.verl import agent_loop as ours

    monkeypatch.setattr(ours, "sandbox_of", lambda _: Prints(["1379\n"] * 9))  # a real one takes seconds to start
    messages = [{"role": "user", "content": "What is 412 + 967?"}]
    prompts = tu.get_tensordict(
        tensor_dict={"index": torch.tensor([0]), "row": torch.tensor([0]), "held_out": torch.tensor([validate])},
        non_tensor_dict={"global_steps": 3, "validate": validate},
    )
    tu.assign_non_tensor_stack(prompts, "uid", ["u"])
    tu.assign_non_tensor_stack(prompts, "raw_prompt", [messages])
    worker = Worker()
    asyncio.run(run(worker))
    return stored, worker.llm_client.asked


def rl(tmp_path: Path, *settings: str) -> RlConfig:
    small = ("rollout.max_response_tokens=400", "data.max_prompt_tokens=300", "train.prompts_per_step=8")
    more = ("train.mini_batch_prompts=8", f"run.root={tmp_path}")
    return load_config(RlConfig, RL, [*small, *more, *settings])


def test_a_validation_gets_its_own_sampling(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not as training does, whose temperature and group size are other ones."""
    training = ("rollout.temperature=0.7", "rollout.group_size=3")
    own = ("validation.temperature=0.3", "validation.top_p=0.8", "validation.n=2")
    stored, asked = sampled(rl(tmp_path, *training, *own), tokenizer, monkeypatch, validate=True)
    assert len(stored) == 2 and len(asked) == 2 * len(TURNS)
    assert {(params["temperature"], params["top_p"]) for params in asked} == {(0.3, 0.8)}


def test_each_token_is_stored_with_its_own_log_probability(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (row, *_), _ = sampled(rl(tmp_path), tokenizer, monkeypatch, validate=False)
    responses, mask = row["responses"].tolist(), row["response_mask"].tolist()
    turns = [tokenizer.encode(turn, add_special_tokens=False) for turn in TURNS]
    assert [token for token, loss in zip(responses, mask, strict=True) if loss] == [*turns[0], *turns[1]]
    assert 0 in mask, "the interpreter's result stands between the turns"
    expected = [logprob_of(token) if loss else 0.0 for token, loss in zip(responses, mask, strict=True)]
    assert row["rollout_log_probs"].tolist() == expected


CALL, ANSWER = TURNS
MASKED_BY = {  # the model's turns and the settings that leave the response out
    "answered": ([CALL, ANSWER], set()),
    "void at the end": ([CALL, "I do not know.<|im_end|>"], {"void_turns"}),
    "cut": ([CALL, "a longer thought " * 90 + ANSWER], {"truncated", "void_turns"}),
}


@pytest.mark.parametrize("case", MASKED_BY)
def test_a_response_that_a_setting_leaves_out_has_no_token_in_the_loss(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
):
    """SimpleTIR, arXiv 2509.02479, Sec. 3.2, for void turns; DAPO, arXiv 2503.14476, Sec. 3.4."""
    script, masked_by = MASKED_BY[case]
    monkeypatch.setattr(sys.modules[__name__], "TURNS", script)
    for kind in ("truncated", "void_turns"):
        config = rl(tmp_path / kind, "rollout.group_size=2", f'algorithm.mask=["{kind}"]')
        (row, *_), _ = sampled(config, tokenizer, monkeypatch, validate=False)
        mask = row["response_mask"].tolist()
        assert len(mask) == len(row["responses"]) == len(row["rollout_log_probs"])
        assert (1 in mask) == (kind not in masked_by), kind
    (row, *_), _ = sampled(config, tokenizer, monkeypatch, validate=True)
    assert 1 in row["response_mask"].tolist(), "a validation leaves out none"
