"""Runs steps of RL in one process, for `make perf`, to measure this package's own share of a step.

    python perf/bench.py rl_alone_cpu --model runs/task/model --data runs/task/rl_train.parquet

The agent loop with its protocol and ledger, the sandbox, the judge, the pass for old
log-probabilities and Megatron's updates with verl's loss are real. Turns have planned lengths
(perf/scripted.py) and random tokens. Missing are the engine, Ray, verl's queue, the assignment of
rows, verl's advantages and the weight sync; case rl_tiny_cpu has them.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import read_rows
from retool_mcore.data.rl_prompts import messages_of, truth_of
from retool_mcore.platforms.base import PLATFORM_ENV, get_platform
from retool_mcore.run.metrics import MetricWriter, PhaseTimer, token_rates

# The variables that torchrun sets. verl's worker reads the address, but nothing listens there.
TORCHRUN_ENV = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip


class RandomTokens:
    """Replaces verl's client of its servers: returns random tokens at once.

    ``ids``: the tokens to choose from, without special tokens. ``requests``: the number of requests
    so far.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.requests = ids, 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any]) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.requests += 1
        count = sampling_params["max_new_tokens"]
        token_ids = random.Random(len(prompt_ids)).choices(self.ids, k=count)
        return TokenOutput(token_ids=token_ids, log_probs=[-5.0] * count, stop_reason="length", extra_fields={})


class Rollout:
    """Samples the trajectories of a step's prompts and computes their rewards."""

    def __init__(self, config: RlConfig, tree: Any, tokenizer: Any) -> None:
        self.config, self.tree, self.tokenizer = config, tree, tokenizer
        self.runner = asyncio.Runner()  # one loop for all steps, because the sandbox's semaphores belong to it
        self.rows = [row for _, row in read_rows(Path(config.data.train_file), ("prompt", "reward_model"))]
        special = set(tokenizer.all_special_ids)
        self.client = RandomTokens([each for each in range(len(tokenizer)) if each not in special])

    def sample(self, step: int) -> list[Any]:
        """The outputs that verl would store, grouped by prompt."""
        prompts = self.config.train.prompts_per_step
        chosen = [at % len(self.rows) for at in range((step - 1) * prompts, step * prompts)]
        return self.runner.run(self._all([(row, sample) for row in chosen for sample in range(self.group_size)]))

    @property
    def group_size(self) -> int:
        return self.config.rollout.group_size

    async def _all(self, responses: Sequence[tuple[int, int]]) -> list[Any]:
        return await asyncio.gather(*(self._one(row, sample) for row, sample in responses))

    async def _one(self, row: int, sample: int) -> Any:
        from omegaconf import OmegaConf
        from scripted import ScriptedAgentLoop
        from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
        from verl.utils.dataset.rl_dataset import RLHFDataset

        loop = ScriptedAgentLoop(
            DictConfigWrap(config=self.tree), server_manager=self.client, tokenizer=self.tokenizer, processor=None,
            hf_model_type="qwen2", dataset_cls=RLHFDataset, data_config=DictConfigWrap(OmegaConf.create({})),
            tools=ToolListWrap([]),
        )  # fmt: skip
        raw, sampling = self.rows[row], {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        columns = {"row": row, "session_id": sample, "global_steps": 1, "held_out": False, "uid": f"{row}"}
        truth = {"ground_truth": truth_of(raw["reward_model"])}
        done = await loop.run(sampling, **columns, raw_prompt=messages_of(raw["prompt"]), reward_model=truth)
        assert not isinstance(done, list), "the sandbox dropped a trajectory"
        return done

    def advantages(self, outputs: Sequence[Any]) -> list[float]:
        """The reward of each response minus the mean of its group."""
        from retool_mcore.verl.reward import compute_score

        rewards = torch.tensor(
            [
                compute_score(
                    "math", "", truth_of(self.rows[output.extra_fields["row"]]["reward_model"]), output.extra_fields,
                    run_config=str(self.config.run.config_file),
                )["score"]
                for output in outputs
            ]
        ).view(-1, self.group_size)  # fmt: skip
        return (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()


def actor_of(config: RlConfig, tree: Any) -> Any:
    """The actor's worker, in this process and without an engine. In a run it is a Ray actor."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from retool_mcore.verl.workers import worker_class

    worker = worker_class(ActorRolloutRefWorker, config.memory)(config=tree.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def batch_of(outputs: Sequence[Any], advantages: Sequence[float]) -> Any:
    """The columns that verl's trainer passes to its actor, except old log-probabilities."""
    from tensordict.tensorclass import NonTensorData
    from verl.utils import tensordict_utils as tu

    columns: dict[str, list[Any]] = {}
    for output, advantage in zip(outputs, advantages, strict=True):
        ids = [*output.prompt_ids, *output.response_ids]
        row = {
            "prompts": output.prompt_ids,
            "responses": output.response_ids,
            "input_ids": ids,
            "position_ids": range(len(ids)),
            "response_mask": output.response_mask,
            "rollout_log_probs": output.response_logprobs,
            "loss_mask": [0] * len(output.prompt_ids) + list(output.response_mask),
            "advantages": [advantage] * len(output.response_ids),
        }
        for name, column in row.items():
            columns.setdefault(name, []).append(torch.tensor(list(column)))
    jagged = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    data = tu.get_tensordict(tensor_dict=jagged, non_tensor_dict={"temperature": 1.0, "pad_token_id": 0})
    tu.assign_non_tensor(data, global_token_num=NonTensorData([len(ids) for ids in columns["input_ids"]]))
    return data


def learn(worker: Any, data: Any, config: RlConfig, timer: PhaseTimer, step: int) -> dict[str, float]:
    """Compute old log-probabilities and run the step's updates, as verl's trainer does."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    with timer.span("old_log_prob"):
        inputs = data.clone(recurse=False)
        tu.assign_non_tensor(inputs, compute_loss=False, calculate_entropy=True)
        found = worker.compute_log_prob(inputs)
        data["old_log_probs"] = response_from_nested(found["log_probs"], data["response_mask"])
    size = config.train.mini_batch_prompts * config.rollout.group_size
    update = {"mini_batch_size": size, "global_batch_size": size, "epochs": 1, "seed": 0}
    tu.assign_non_tensor(data, dataloader_kwargs={"shuffle": False}, **update)
    with timer.span("update_actor"):
        metrics = tu.get(worker.update_actor(data), "metrics")
    return {name: float(metrics[name][-1]) for name in ("loss", "grad_norm")}


def train(config: RlConfig, tree: Any) -> None:
    platform = get_platform(config.run.platform)
    worker = actor_of(config, tree)
    rollout = Rollout(config, tree, worker.actor.model_config.tokenizer)
    writer, timer = MetricWriter(config, resumed_step=0), PhaseTimer()
    timer.flush()
    for step in range(1, config.train.steps + 1):
        with timer.span("gen"):
            requests, outputs = rollout.client.requests, rollout.sample(step)
        with timer.span("reward"):
            advantages = rollout.advantages(outputs)
        data = batch_of(outputs, advantages)
        metrics = learn(worker, data, config, timer, step)
        times, tokens = timer.flush(), float(data["input_ids"].offsets()[-1])
        metrics["behavior/requests"] = (rollout.client.requests - requests) / len(outputs)
        row = {**metrics, "memory_gib": platform.peak_memory_gib(), **times}
        writer.write(step, row | token_rates(tokens, times, 1))
    writer.close()


def main(file: str, words: Sequence[str]) -> None:
    config = load_config(RlConfig, file, words)
    platform = get_platform(config.run.platform)
    platform.activate()
    os.environ |= {**TORCHRUN_ENV, PLATFORM_ENV: platform.name}
    from retool_mcore.verl.keys.rollout import write_settings
    from retool_mcore.verl.keys.tree import ppo_tree
    from retool_mcore.verl.plugin import assert_loaded

    assert_loaded()
    platform.set_device(0)
    config.run.dir.mkdir(parents=True)
    write_settings(config)
    with tempfile.TemporaryDirectory(prefix="rl_alone_") as folder:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group(platform.device.comm_backend, init_method=rendezvous, rank=0, world_size=1)
        train(config, ppo_tree(config, platform))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
