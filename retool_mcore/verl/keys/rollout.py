"""verl's keys for sampling responses and choosing which of them to learn from."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

import yaml

from retool_mcore.config import EvaluationConfig, RlConfig, RlTrain, RunConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.run_settings import RUN_CONFIG

VERL = Path(__file__).parents[1]  # the folder of the files that verl loads by path

AGENT_NAME = "retool"
TRAINER_MODES = {  # train.mode -> our trainers
    "sync": "retool_sync",
    "partial_rollout": "retool_partial_rollout",
    "async": "retool_async",
}
OWN_ENGINE_ARGS = {  # SGLang's and vLLM's names -> the run file's own setting
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp_size": "rollout.engine_tp",
    "tensor_parallel_size": "rollout.engine_tp",
    "mem_fraction_static": "rollout.engine_memory_fraction",
    "gpu_memory_utilization": "rollout.engine_memory_fraction",
    "max_running_requests": "rollout.max_running_requests",
    "max_num_seqs": "rollout.max_running_requests",
    "random_seed": "run.seed",
    "seed": "run.seed",
}
OWN_RL_ENGINE_ARGS = OWN_ENGINE_ARGS | {"quantization": "rollout.precision"}  # which `retool eval` has not


def rollout_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    r = config.rollout
    rollout = "actor_rollout_ref.rollout."
    keys: dict[str, Any] = {
        rollout + "name": platform.rollout.engine.name,
        rollout + "mode": "async",
        rollout + "n": r.group_size,
        rollout + "temperature": r.temperature,
        rollout + "top_p": r.top_p,
        rollout + "dtype": config.model.dtype,
        **({rollout + "quantization": r.precision} if r.precision != "model" else {}),
        rollout + "seed": config.run.seed,
        rollout + "tensor_model_parallel_size": r.engine_tp,
        rollout + "gpu_memory_utilization": r.engine_memory_fraction,
        rollout + "max_num_seqs": r.max_running_requests,
        rollout + "max_model_len": config.max_sequence_tokens,
        rollout + "load_format": "dummy",  # the first weight sync fills it before the first rollout
        rollout + "calculate_log_probs": True,
        rollout + "enable_rollout_routing_replay": config.algorithm.router_replay == "R3",
        rollout + "free_cache_engine": platform.rollout.free_cache_engine,
        rollout + "enforce_eager": platform.rollout.enforce_eager,
        rollout + "router_config_path": str(router_file(config)),
        rollout + "agent.num_workers": r.agent_workers,
        rollout + "agent.default_agent_loop": AGENT_NAME,
        rollout + "agent.agent_loop_config_path": str(agent_loop_file(config)),
        rollout + "multi_turn.enable": True,
        rollout + "multi_turn.max_assistant_turns": r.max_turns,
        rollout + "val_kwargs.n": config.validation.n,
        rollout + "val_kwargs.do_sample": config.validation.temperature > 0,
        rollout + "val_kwargs.temperature": config.validation.temperature,
        rollout + "val_kwargs.top_p": config.validation.top_p,
    }
    engine_kwargs = f"{rollout}engine_kwargs.{platform.rollout.engine.name}."
    return keys | {engine_kwargs + key: value for key, value in engine_args(config, platform).items()}


def engine_args(config: RlConfig | EvaluationConfig, platform: Platform) -> dict[str, Any]:
    """The rollout engine's own arguments, for training and evaluation.

    Raises ConfigError like ``check_engine_args``.
    """
    check_engine_args(config, platform)
    argument = platform.rollout.engine.seed_argument
    seed = {argument: config.run.seed} if argument else {}
    return {**platform.rollout_engine_kwargs(), **seed, **config.rollout.engine_args}


def check_engine_args(config: RlConfig | EvaluationConfig, platform: Platform) -> None:
    """Raise ConfigError for ``rollout.engine_args`` that are unknown, have a setting of their own,
    or cannot work in training.
    """
    args = config.rollout.engine_args
    own = OWN_RL_ENGINE_ARGS if isinstance(config, RlConfig) else OWN_ENGINE_ARGS
    if taken := sorted(args.keys() & own.keys()):
        ours = ", ".join(f"{name}: {own[name]}" for name in taken)
        raise ConfigError(f"{config.source}: rollout.engine_args may not set what has a setting of its own ({ours}).")
    if not args:
        return
    engine = platform.rollout.engine
    draft = args.get(engine.draft_argument) if engine.draft_argument else None
    if isinstance(config, RlConfig) and draft is not None and draft not in engine.drafts_without_weights:
        raise ConfigError(
            f'{config.source}: rollout.engine_args has {engine.draft_argument} = "{draft}", which drafts with weights '
            "of its own. In training no weight sync fills them, and an engine's sleep discards them (sglang issue "
            f'31674). Use "{engine.drafts_without_weights[0]}", or leave it to `retool eval`.'
        )
    known = engine.known_arguments()
    if known is not None and (unknown := sorted(args.keys() - known)):
        near = difflib.get_close_matches(unknown[0], known)
        hint = f" Near it: {', '.join(near)}." if near else ""
        raise ConfigError(
            f"{config.source}: rollout.engine_args has {', '.join(unknown)}, which {engine.title}'s arguments do not "
            f"have.{hint}"
        )


def sampler_keys(config: RlConfig) -> dict[str, Any]:
    sampler = "trainer.v1.sampler."
    return {
        sampler + "custom_sampler.path": str(VERL / "replay.py"),
        sampler + "custom_sampler.name": "SyncReplay" if config.train.mode == "sync" else "AsyncReplay",
        sampler + "sampler_kwargs": {RUN_CONFIG: str(config.run.config_file)},
        sampler + "max_off_policy_threshold": _age_limit(config.train),
        sampler + "max_off_policy_strategy": config.train.when_stale,
        "trainer.v1.colocate_async.num_warmup_batches": config.train.prefetch_batches,
    }


def _age_limit(train: RlTrain) -> int:
    """verl's bound on a group's age, which is 1 in the step that starts its prompt.

    With "wait", verl waits for groups of that age and takes the oldest first. Up to
    train.prefetch_batches batches may then stand in front of a group, which grows older while they
    are learnt from.
    """
    if train.mode != "sync" and train.when_stale == "wait":
        return train.max_staleness + 2 - math.ceil(train.prefetch_batches)
    return train.max_staleness + 1


def async_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    """Trainer and engines on devices of their own: the devices, and how weights are transferred."""
    if config.train.mode != "async":
        return {}
    c, gpus = config.cluster, config.rollout.gpus
    nodes, per_node = (1, gpus) if c.nodes == 1 else (gpus // c.gpus_per_node, c.gpus_per_node)
    rollout, separate = "actor_rollout_ref.rollout.", "trainer.v1.separate_async."
    backend, module = platform.rollout.weight_transport
    return {
        "actor_rollout_ref.hybrid_engine": False,  # no second set of engines on the trainer's devices
        rollout + "nnodes": nodes,
        rollout + "n_gpus_per_node": per_node,
        rollout + "checkpoint_engine.backend": backend,
        rollout + "checkpoint_engine.custom_backend_module": module,
        "trainer.nnodes": 1 if c.nodes == 1 else c.nodes - nodes,
        "trainer.n_gpus_per_node": c.gpus_per_node - gpus if c.nodes == 1 else c.gpus_per_node,
        separate + "num_warmup_batches": config.train.prefetch_batches,
        separate + "parameter_sync_step": config.train.updates_per_step,
    }


def trajectories_in_flight(config: RlConfig) -> int:
    """The most trajectories in flight in training: a step's, and those sampled ahead."""
    ahead = 0 if config.train.mode == "sync" else math.ceil(config.train.prefetch_batches)
    return config.train.prompts_per_step * config.rollout.group_size * (1 + ahead)


def agent_loop_file(config: RunConfig) -> Path:
    """Where ``write_settings`` puts the file through which verl finds our agent loop."""
    return config.run.dir.absolute() / "agent_loop.yaml"


def router_file(config: RunConfig) -> Path:
    """Where ``write_settings`` names our class that routes trajectories to engines."""
    return config.run.dir.absolute() / "router.yaml"


def write_settings(config: RlConfig) -> None:
    """Write what Ray workers read: the run's settings; how to make our agent loop and router."""
    config.run.config_file.write_text(config.to_toml(), encoding="utf-8")
    run_config = {RUN_CONFIG: str(config.run.config_file)}
    router = {"router_class": "retool_mcore.verl.router.Router", **run_config}
    router_file(config).write_text(yaml.safe_dump(router, sort_keys=False), encoding="utf-8")
    entry = {"name": AGENT_NAME, "_target_": "retool_mcore.verl.agent_loop.ReToolAgentLoop", **run_config}
    agent_loop_file(config).write_text(yaml.safe_dump([entry], sort_keys=False), encoding="utf-8")
