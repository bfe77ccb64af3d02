"""verl's keys for the rollout engines and for the replay buffer."""

import difflib
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from retool_mcore.config import EvaluationConfig, RlConfig, RlTrain, RunConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.key import OUR_CODE, ROLLOUT_PREFIX, Key, from_setting, values

RUN_CONFIG = "run_config"  # name of the argument in verl's tree that has the path of the run's settings
OUR_FOLDER = Path(__file__).parents[1]  # the folder of the files that verl loads by path

_SAMPLER = "trainer.v1.sampler."
LENGTH = "rollout.max_response_tokens"
NODES = "the section [cluster] and rollout.gpus"
VALIDATION = "the section [validation]"
FULL_DISTRIBUTION = "training, whose log-probs assume samples from all tokens"
AGENT_NAME = "retool"
TRAINER_MODES = {  # train.mode -> our trainers
    "sync": "retool_sync",
    "partial_rollout": "retool_partial_rollout",
    "async": "retool_async",
}
ARGS_SET_BY_US = {  # argument of SGLang or vLLM -> our setting
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
RL_ARGS_SET_BY_US = ARGS_SET_BY_US | {  # settings that `retool eval` lacks
    "quantization": "rollout.precision",
    "kv_cache_dtype": "rollout.kv_cache",
    # SGLang 0.5.14 divides by this file's scales when it writes the KV cache, but its attention
    # multiplies by k_scale_float, which the file does not set.
    "quantization_param_path": "rollout.kv_cache",
}


# The functions take the run and its platform. Keys under "actor_rollout_ref.rollout.":
ROLLOUT = (
    Key("name", "run.platform", lambda _, platform: platform.rollout.engine.name),
    Key("mode", None, "async"),
    from_setting("n", "rollout.group_size"),
    from_setting("temperature", "rollout.temperature"),
    from_setting("top_p", "rollout.top_p"),
    Key("top_k", FULL_DISTRIBUTION, -1),
    Key("prompt_length", "data.max_prompt_tokens"),  # verl interpolates both lengths from [data]
    Key("response_length", LENGTH),
    from_setting("dtype", "model.dtype"),
    from_setting("quantization", "rollout.precision", when=lambda run, _: run.rollout.precision != "model"),
    from_setting("seed", "run.seed"),
    from_setting("tensor_model_parallel_size", "rollout.engine_tp"),
    from_setting("gpu_memory_utilization", "rollout.engine_memory_fraction"),
    from_setting("max_num_seqs", "rollout.max_running_requests"),
    Key("max_model_len", f"data.max_prompt_tokens and {LENGTH}", lambda run, _: run.max_sequence_tokens),
    Key("load_format", OUR_CODE, "dummy"),  # the first weight sync precedes the first rollout
    Key("calculate_log_probs", OUR_CODE, True),
    Key("enable_rollout_routing_replay", "algorithm.router_replay", lambda run, _: run.algorithm.router_replay == "R3"),
    Key("free_cache_engine", None, lambda _, platform: platform.rollout.free_cache_engine),
    Key("enforce_eager", None, lambda _, platform: platform.rollout.enforce_eager),
    from_setting("agent.num_workers", "rollout.agent_workers"),
    Key("agent.default_agent_loop", OUR_CODE, AGENT_NAME),
    Key("agent.agent_loop_manager_class", OUR_CODE),  # verl/runner.py creates our manager
    Key("agent.agent_loop_config_path", None, lambda run, _: str(agent_loop_file(run))),  # perf/bench.py overrides it
    Key("multi_turn.enable", None, True),
    from_setting("multi_turn.max_assistant_turns", "rollout.max_turns"),
    Key("val_kwargs", VALIDATION),
    from_setting("val_kwargs.n", "validation.n"),
    Key("val_kwargs.do_sample", VALIDATION, lambda run, _: run.validation.temperature > 0),
    from_setting("val_kwargs.temperature", "validation.temperature"),
    from_setting("val_kwargs.top_p", "validation.top_p"),
    Key("engine_kwargs.sglang", "rollout.engine_args"),  # `rollout_keys` sets the keys below it
)


def rollout_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    engine_kwargs = f"{ROLLOUT_PREFIX}engine_kwargs.{platform.rollout.engine.name}."
    arguments = {engine_kwargs + key: value for key, value in engine_args(config, platform).items()}
    return values(ROLLOUT, config, platform, under=ROLLOUT_PREFIX) | arguments


def engine_args(config: RlConfig | EvaluationConfig, platform: Platform) -> dict[str, Any]:
    """The server arguments of the rollout engine (SGLang's or vLLM's), for training and evaluation.

    Raises ConfigError like ``check_engine_args``.
    """
    check_engine_args(config, platform)
    engine = platform.rollout.engine
    argument = engine.seed_argument
    seed = {argument: config.run.seed} if argument else {}
    graphs: dict[str, int] = {}
    if not platform.rollout.enforce_eager:
        graphs = engine.graphs(config.rollout.max_running_requests, config.rollout.engine_tp)
    arguments = {**platform.rollout_engine_kwargs(), **graphs, **seed, **config.rollout.engine_args}
    if isinstance(config, RlConfig) and config.rollout.kv_cache == "fp8":
        assert engine.fp8_cache is not None, f"platform {platform.name} accepted an FP8 cache that its engine lacks"
        name, value = engine.fp8_cache
        arguments[name] = value
    return arguments


def check_engine_args(config: RlConfig | EvaluationConfig, platform: Platform) -> None:
    """Raise ConfigError for ``rollout.engine_args`` that are unknown, that duplicate one of our
    settings, or that cannot work in training.
    """
    args = config.rollout.engine_args
    own = RL_ARGS_SET_BY_US if isinstance(config, RlConfig) else ARGS_SET_BY_US
    if controlled := sorted(args.keys() & own.keys()):
        settings = ", ".join(f"{name}: {own[name]}" for name in controlled)
        raise ConfigError(
            f"{config.source}: rollout.engine_args may not set arguments that a setting controls ({settings})."
        )
    if not args:
        return
    engine = platform.rollout.engine
    draft = args.get(engine.draft_argument) if engine.draft_argument else None
    if isinstance(config, RlConfig) and draft is not None and draft not in engine.drafts_without_weights:
        raise ConfigError(
            f'{config.source}: rollout.engine_args has {engine.draft_argument} = "{draft}", which needs a draft model. '
            "In training, an engine's sleep discards the draft model's weights, and no weight sync restores them "
            f'(sglang issue 31674). Use "{engine.drafts_without_weights[0]}", or set it only for `retool eval`.'
        )
    known = engine.known_arguments()
    if known is not None and (unknown := sorted(args.keys() - known)):
        near = difflib.get_close_matches(unknown[0], known)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"{config.source}: rollout.engine_args has {', '.join(unknown)}, which {engine.title} does not know.{hint}"
        )


def _age_limit(train: RlTrain) -> int:
    """verl's limit on a group's age in steps; the age is 1 in the step that submits its prompt.

    With "wait", a group that reaches the limit may still be in the last of train.prefetch_batches
    queued batches. Each step trains one of them, so the group becomes older by up to
    ceil(prefetch_batches) - 1 steps. The limit is lower than that of "drop" by this number.
    """
    if train.mode != "sync" and train.when_stale == "wait":
        return train.staleness_limit + 2 - math.ceil(train.prefetch_batches)
    return train.staleness_limit + 1


def _engine_nodes(run: RlConfig) -> tuple[int, int]:
    """Number of engine nodes and of devices on each, if engines run on separate devices."""
    c, gpus = run.cluster, run.rollout.gpus
    return (1, gpus) if c.nodes == 1 else (gpus // c.gpus_per_node, c.gpus_per_node)


def _trainer_nodes(run: RlConfig, _: Platform) -> int:
    return 1 if run.cluster.nodes == 1 else run.cluster.nodes - _engine_nodes(run)[0]


def _trainer_devices(run: RlConfig, _: Platform) -> int:
    return run.cluster.gpus_per_node - (run.rollout.gpus if run.cluster.nodes == 1 else 0)


def run_config_argument(run: RlConfig, *_: Any) -> dict[str, str]:
    """The argument with which verl creates our classes: the path of the run's settings."""
    return {RUN_CONFIG: str(run.run.config_file)}


SAMPLER = (
    Key(_SAMPLER + "custom_sampler", OUR_CODE),
    Key(_SAMPLER + "custom_sampler.path", OUR_CODE, str(OUR_FOLDER / "replay.py")),
    Key(
        _SAMPLER + "custom_sampler.name",
        OUR_CODE,
        lambda run, _: "SyncReplay" if run.train.mode == "sync" else "AsyncReplay",
    ),
    Key(
        _SAMPLER + "sampler_kwargs",
        "the sections [rollout], [train] and [validation]",
        run_config_argument,
    ),
    Key(_SAMPLER + "max_off_policy_threshold", "train.max_staleness", lambda run, _: _age_limit(run.train)),
    Key(_SAMPLER + "max_off_policy_strategy", "train.max_staleness", lambda run, _: run.train.when_stale),
    from_setting("trainer.v1.colocate_async.num_warmup_batches", "train.prefetch_batches"),
)
# With train.mode = "async" trainer and engines run on separate devices.
ASYNC = (
    Key("actor_rollout_ref.hybrid_engine", "train.mode", False),  # no additional engines on the trainer's devices
    Key(ROLLOUT_PREFIX + "nnodes", NODES, lambda run, _: _engine_nodes(run)[0]),
    Key(ROLLOUT_PREFIX + "n_gpus_per_node", NODES, lambda run, _: _engine_nodes(run)[1]),
    Key(
        ROLLOUT_PREFIX + "checkpoint_engine.backend",
        "run.platform",
        lambda _, platform: platform.rollout.weight_transport[0],
    ),
    Key(
        ROLLOUT_PREFIX + "checkpoint_engine.custom_backend_module",
        "run.platform",
        lambda _, platform: platform.rollout.weight_transport[1],
    ),
    Key("trainer.nnodes", NODES, _trainer_nodes),
    Key("trainer.n_gpus_per_node", NODES, _trainer_devices),
    from_setting("trainer.v1.separate_async.num_warmup_batches", "train.prefetch_batches"),
    Key(
        "trainer.v1.separate_async.parameter_sync_step",
        "train.prompts_per_step and train.mini_batch_prompts",
        lambda run, _: run.train.updates_per_step,
    ),
)


def agent_loop_file(config: RunConfig) -> Path:
    """Path of verl's agent-loop config, which ``write_settings`` writes."""
    return config.run.dir.absolute() / "agent_loop.yaml"


def write_settings(config: RlConfig) -> None:
    """Write the files that Ray workers read: the run's settings and verl's agent-loop config."""
    config.run.config_file.write_text(config.to_toml(), encoding="utf-8")
    target = "retool_mcore.verl.agent_loop.ReToolAgentLoop"
    entry = {"name": AGENT_NAME, "_target_": target, **run_config_argument(config)}
    agent_loop_file(config).write_text(yaml.safe_dump([entry], sort_keys=False), encoding="utf-8")


@lru_cache(maxsize=1)
def settings_of_run(path: str) -> RlConfig:
    """The settings of this process's run; reads the file at ``path`` only once.

    All processes that verl starts read the run's ``config.toml``, which every node can read.
    """
    return load_config(RlConfig, path)
