"""Run by test_vllm_on_cpu.py in a process of its own: verl's vLLM server on a CPU, our loop before
it, and verl's own way of its weights to it.

Prints one JSON object in its last line. ``python -m tests.nightly.ascend.vllm_scenario FOLDER``.
"""

import asyncio
import contextlib
import copy
import inspect
import json
import os
import sys
from collections.abc import Collection, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.cpu.platform import Cpu
from retool_mcore.platforms.rollout_engines import VLLM
from retool_mcore.rollout.engine import Sampling
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory, run_trajectory
from retool_mcore.rollout.protocol import checked_prompt, protocol_of
from retool_mcore.sandbox import open_sandbox
from retool_mcore.verl.agent_loop import VerlEngine
from retool_mcore.verl.keys.tree import ppo_tree
from retool_mcore.verl.plugin import assert_loaded

CONFIG = Path(__file__).parents[3] / "configs/rl_tiny_cpu.toml"
# For a machine of few cores, on which other tests run, too.
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
QUESTION = [{"role": "user", "content": "412 + 967?"}]
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(412 + 967)"}}\n</tool_call>'
TURNS = [f"I add.\n{CALL}", "It is \\boxed{1379}.<|im_end|>"]


class CpuWithVllm(Cpu):
    """Platform cpu as it trains, with the engine of platform ascend."""

    rollout = replace(Cpu.rollout, engine=VLLM)

    def rollout_engine_kwargs(self) -> dict[str, Any]:
        return {}


class Handle:
    """Calls an object of this process as a Ray handle calls an actor: by copies of the arguments,
    in the actor's event loop, whatever thread asks.
    """

    def __init__(self, actor: Any) -> None:
        self.actor, self.loop = actor, asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, getattr(self.actor, name)))

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        async def called() -> Any:
            result = method(*copied[0], **copied[1])
            return await result if inspect.isawaitable(result) else result

        copied = copy.deepcopy((args, kwargs))
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self.loop))


def settings(folder: Path) -> RlConfig:
    own = [f"run.root={folder}", f"model.path={folder / 'model'}", "data.max_prompt_tokens=256"]
    own += ["rollout.max_response_tokens=768", "rollout.max_running_requests=8", "rollout.engine_memory_fraction=0.2"]
    return load_config(RlConfig, CONFIG, own)


class Server:
    """verl's replica with one server, the client that our loop asks, and the way of its weights.

    No Ray: what would be actors are objects of this process.
    """

    def __init__(self, config: RlConfig) -> None:
        self.tree = ppo_tree(config, CpuWithVllm())
        # vLLM sleeps on devices only.
        OmegaConf.update(self.tree, "actor_rollout_ref.rollout.enable_sleep_mode", False, force_add=True)

    async def start(self) -> None:
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.router import GlobalRequestLoadBalancer
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

        rollout, model = self.tree.actor_rollout_ref.rollout, self.tree.actor_rollout_ref.model

        class CpuServer(vLLMHttpServer):
            def _get_worker_extension_cls(self) -> str:
                return "tests.nightly.ascend.vllm_worker.KeepsWeights"

        server = CpuServer(rollout, model, RolloutMode.HYBRID, [], 0, 0, 1, 1, "")
        await server.launch_server()
        self.handle = Handle(server)
        self.replica: Any = vLLMReplica(0, rollout, model, gpus_per_node=1)
        self.replica.servers = [self.handle]
        self.router = Handle(GlobalRequestLoadBalancer({"0": self.handle}))

    async def until(self, tokens: int) -> None:
        """Returns once a running request has so many."""
        states = self.handle.actor.engine.output_processor.request_states
        while not any(state.detokenizer.num_output_tokens() >= tokens for state in states.values()):
            await asyncio.sleep(0.01)

    def engine(self) -> VerlEngine:
        from verl.workers.rollout.llm_server import LLMServerClient

        return VerlEngine(LLMServerClient(self.tree, self.router), request_seeds=VLLM.request_seeds)

    async def send(self, model: torch.nn.Module, version: int) -> None:
        """By verl's own adapter, as a worker of the training has it; it blocks its thread."""
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        adapter: Any = ServerAdapter(self.replica.config, self.tree.actor_rollout_ref.model, cast(Any, None), 0)
        adapter.server_handle = self.handle
        await asyncio.to_thread(asyncio.run, adapter.update_weights(_weights(model), global_steps=version))


def _weights(model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
    for name, weight in model.state_dict().items():
        yield name, weight.detach()


def random_model(folder: Path, tokenizer: Any, seed: int) -> None:
    """The quickstart's model with heads of 32 values, which vLLM's attention on CPUs wants."""
    write_model(folder, tokenizer, seed)
    # No rows beyond the tokenizer's words, which verl's server masks and a forward pass does not.
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = AutoConfig.from_pretrained(folder, **shape)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def endless(model: Any, stops: Collection[int]) -> None:
    """Keep the model from stop tokens, so that a turn lasts as long as its budget."""
    with torch.no_grad():
        # A channel that is the same for every word, and that no layer adds to, stands for a bias.
        model.model.embed_tokens.weight[:, 0] = 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[list(stops)] = 0
        model.lm_head.weight[list(stops), 0] = -20


def overfitted(model: Any, prompt: list[int], response: list[int]) -> None:
    """Teach the model to say the response, so that sampling repeats it nearly surely."""
    whole = torch.tensor([[*prompt, *response]])
    labels = whole.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model(whole, labels=labels).loss.backward()
        optimizer.step()


def log_probs(model: Any, trajectory: Trajectory, temperature: float) -> list[float]:
    """Of the response's tokens, by one forward pass over all of them."""
    ledger = trajectory.ledger
    context = torch.tensor([ledger.context])
    with torch.no_grad():
        logits = model(context).logits[0, len(ledger.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, context[0, len(ledger.prompt_ids) :, None])[:, 0].tolist()


def described(trajectory: Trajectory, models: dict[int, Any], temperature: float = 1.0) -> dict[str, Any]:
    """A trajectory, and how far the engine's log-probabilities are from a forward pass of the
    weights that it names for each token.
    """
    ledger, gaps = trajectory.ledger, [0.0]
    forward = {version: log_probs(model, trajectory, temperature) for version, model in models.items()}
    for at, (version, loss) in enumerate(zip(ledger.versions, ledger.loss_mask, strict=True)):
        if loss:
            gaps.append(abs(forward[version][at] - ledger.logprobs[at]))
    return {
        "stop": trajectory.stop_reason, "ids": ledger.response_ids, "mask": ledger.loss_mask, "gap": max(gaps),
        "versions": ledger.versions, "logprobs": ledger.logprobs, "answer": trajectory.answer,
        "shown": [result.shown for turn in trajectory.turns for result in turn.results],
        "turns": [turn.tokens for turn in trajectory.turns], "error": trajectory.drop_error,
    }  # fmt: skip


class Sampler:
    """Our loop before the server, with a run's settings."""

    def __init__(self, config: RlConfig, server: Server, tokenizer: Any) -> None:
        self.config, self.server, self.tokenizer = config, server, tokenizer
        # Shared, as in a run; it starts at the first call.
        self.sandbox = open_sandbox("local", min_level="rlimits", workers=1)
        self.protocol = protocol_of(config.rollout, tokenizer)
        self.prompt = checked_prompt(self.protocol, QUESTION, config.data.max_prompt_tokens, "here")

    async def run(self, name: str, *, tokens: int = 400, temperature: float = 1.0) -> Trajectory:
        limits = replace(Limits.of(self.config.rollout, self.config.sandbox), max_response_tokens=tokens)
        return await run_trajectory(
            self.prompt, engine=self.server.engine(), sandbox=self.sandbox, protocol=self.protocol, limits=limits,
            sampling=Sampling(temperature=temperature), trajectory_id=name,
        )  # fmt: skip


async def interrupted(sampler: Sampler, models: dict[int, Any]) -> dict[str, Any]:
    """A turn that a weight sync cuts off, as in mode "partial_rollout"."""
    replica = sampler.server.replica
    running = asyncio.create_task(sampler.run("interrupted", tokens=700))
    await asyncio.wait_for(sampler.server.until(20), 60)
    counted = await replica.abort_all_requests()
    await sampler.server.send(models[2], 2)
    await replica.resume_generation()
    trajectory = await running
    crossed = described(trajectory, {1: models[2], 2: models[1]})["gap"]
    return {**described(trajectory, models), "aborted": counted["aborted_count"], "crossed": crossed}


async def called(sampler: Sampler, model: Any) -> dict[str, Any]:
    """A model that makes a call and answers, with the interpreter between."""
    turns = [sampler.tokenizer.encode(text, add_special_tokens=False) for text in TURNS]
    between = sampler.protocol.result_ids(turns[0], ["1379"])
    overfitted(model, sampler.prompt, [*turns[0], *between, *turns[1]])
    await sampler.server.send(model, 3)
    cold = 0.5  # at 1.0 one response of fifteen leaves what it was taught
    trajectory = await sampler.run("called", temperature=cold)
    return {**described(trajectory, {3: model}, cold), "taught": turns, "between": len(between)}


async def main(folder: Path) -> dict[str, Any]:
    os.environ.update(SMALL)
    get_platform("cpu").activate()
    assert_loaded()
    tokenizer = build_tokenizer(tokenizer_rows())
    config = settings(folder)
    for seed, name in enumerate(("model", "other")):
        random_model(folder / name, tokenizer, seed)
    models = {
        version: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for version, name in enumerate(("model", "other", "model"), 1)
    }
    server = Server(config)
    sampler = Sampler(config, server, tokenizer)
    for version in (1, 2):
        endless(models[version], sampler.protocol.stop_token_ids)
    with (
        mock.patch("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: str(os.getpid()))),
        mock.patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"),
    ):
        await server.start()
        await server.send(models[1], 1)
        length = await sampler.run("length", tokens=24, temperature=0.7)
        found = {"length": described(length, models, 0.7), "interrupted": await interrupted(sampler, models)}
        found["called"] = await called(sampler, models[3])
        await sampler.sandbox.close()
        server.handle.actor.engine.shutdown()
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = asyncio.run(main(Path(sys.argv[1])))
    print(json.dumps(result))
