"""From our configuration to verl 0.9.1's: what SFT and RL share, and RL's whole tree.

Only the files of verl/keys spell verl's key paths. RL runs verl's PPO trainer, which takes the
whole Hydra tree: verl itself composes its defaults, and this module changes them key by key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retool_mcore.config import Experts, Memory, RlConfig, RunConfig
from retool_mcore.config.files import parquet_files
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.algorithm import algorithm_keys
from retool_mcore.verl.keys.refused import ENGINE_LOG_PROB_KEYS, RL_KEYS, refuse
from retool_mcore.verl.keys.rollout import TRAINER_MODES, VERL, async_keys, rollout_keys, sampler_keys
from retool_mcore.verl.keys.template import template_keys
from retool_mcore.verl.run_settings import RUN_CONFIG

if TYPE_CHECKING:
    from omegaconf import DictConfig

_RUN_CONFIG_KEY = "trainer.retool_config"  # our key in verl's tree: the file of the run's own settings


def megatron_keys(config: RunConfig, platform: Platform) -> dict[str, Any]:
    """Keys of verl's McoreEngineConfig, for SFT's engine and RL's actor, critic and reference."""
    parallel, memory = config.parallel, config.memory
    sequence_parallel = parallel.sequence_parallel and parallel.tp > 1
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp or None,  # None: as tp
        "sequence_parallel": sequence_parallel,
        "use_distributed_optimizer": True,
        "use_mbridge": True,
        "vanilla_mbridge": True,  # ARCHITECTURE.md, "The bridge"
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "dist_ckpt_optim_fully_reshardable": config.checkpoint.reshardable,
        # Gather on one host process; Megatron's other way gives every rank all states of its
        # data-parallel group.
        "distrib_optim_fully_reshardable_mem_efficient": config.checkpoint.reshardable,
        "param_offload": memory.offload_idle,
        "optimizer_offload": memory.offload_idle,
        "override_ddp_config": dict(platform.training.ddp_options),
        "override_transformer_config": {
            **platform.training.transformer_options,
            "sequence_parallel": sequence_parallel,  # mbridge takes it from here, and defaults to on
            **({"context_parallel_size": parallel.cp} if parallel.cp > 1 else {}),
            **_recompute_keys(memory),
            **_expert_keys(config.experts),
            **({"fp8": "hybrid", "fp8_recipe": config.model.fp8} if config.model.fp8 != "off" else {}),
        },
    }


def _recompute_keys(memory: Memory) -> dict[str, Any]:
    """Keys of Megatron's TransformerConfig."""
    if memory.recompute in ("none", "auto"):  # "auto" sets Megatron's keys anew for each micro-batch
        return {}
    if memory.recompute == "selective":
        # Flash attention keeps no score matrix, so the attention core has nothing to recompute.
        return {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    if memory.recompute_layers:
        layers = {"recompute_method": "block", "recompute_num_layers": memory.recompute_layers}
    else:
        layers = {"recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "full", **layers}


def _expert_keys(experts: Experts) -> dict[str, Any]:
    """Keys of Megatron's TransformerConfig, which a dense model ignores.

    What is left out has mbridge's values: no load-balancing loss, and grouped products wherever
    there is Transformer Engine.
    """
    keys: dict[str, Any] = {}
    if experts.router_dtype == "float32":
        keys["moe_router_dtype"] = "fp32"
    if experts.load_balancing != "none":
        keys |= {
            "moe_router_load_balancing_type": experts.load_balancing,
            "moe_aux_loss_coeff": experts.aux_loss_coef,
        }
    if experts.permute_fusion:
        keys["moe_permute_fusion"] = True
    return keys


def optim_keys(config: RunConfig, updates: int) -> dict[str, Any]:
    """Keys of verl's McoreOptimizerConfig.

    The schedule counts optimizer updates; the whole run makes ``updates`` of them.
    """
    optim = config.optim
    return {
        "lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_decay_style": optim.schedule,
        "lr_decay_steps": updates,
        "lr_warmup_steps": round(optim.warmup_fraction * updates),
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip_grad,
        "total_training_steps": updates,
        # Without this key verl 0.9.1 saves the schedule but does not load it, and a resumed run
        # starts its warm-up again.
        "use_checkpoint_opt_param_scheduler": True,
        **_state_keys(config.memory),
        # verl 0.9.1 passes its own `betas` to Muon only; Adam uses Megatron's defaults unless they
        # are set here.
        "override_optimizer_config": {
            "adam_beta1": optim.beta1,
            "adam_beta2": optim.beta2,
            **_offload_keys(config.memory),
        },
    }


def _state_keys(memory: Memory) -> dict[str, Any]:
    """Keys of verl's McoreOptimizerConfig for the precision of the optimizer's states."""
    keys: dict[str, Any] = {}
    if memory.adam_states != "float32":
        moments = "fp32" if memory.adam_states == "compact" else "bf16"
        # Megatron then also stores a master weight as the bfloat16 weight and its 16 missing bits.
        keys |= {"use_precision_aware_optimizer": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    return keys


def _offload_keys(memory: Memory) -> dict[str, Any]:
    """Keys of Megatron's OptimizerConfig for states that live and are updated on the host."""
    if not memory.optimizer_on_cpu:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": memory.optimizer_on_cpu,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,  # the offloading optimizer takes gradients that way only
    }


def ppo_defaults() -> DictConfig:
    """verl's own tree for its PPO trainer on a Megatron engine, without our keys."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(folder, version_base=None):
        tree = compose("ppo_trainer", overrides=["model_engine=megatron"])
    OmegaConf.set_struct(tree, True)
    return tree


def check_ppo_tree(tree: DictConfig) -> None:
    """Check the tree with verl's own configuration classes and its own check.

    Raises ConfigError with verl's message.
    """
    from hydra.errors import InstantiationException
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    resolved = OmegaConf.create(OmegaConf.to_container(tree, resolve=True))
    try:
        for part in ("actor", "rollout"):
            omega_conf_to_dataclass(resolved.actor_rollout_ref[part])
        validate_config(resolved, need_reference_policy(resolved), need_critic(resolved))
    except (InstantiationException, ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"verl refuses the resolved settings: {error}") from error


def ppo_tree(config: RlConfig, platform: Platform, resume: Path | None = None) -> DictConfig:
    """verl's complete, resolved tree for its PPO trainer.

    ``resume`` is the folder of a complete checkpoint. Raises ConfigError when a key of
    ``[verl_overrides]`` is not in verl's tree, or when a setting of ours decides it.
    """
    import verl
    from omegaconf import OmegaConf

    decided = RL_KEYS | (ENGINE_LOG_PROB_KEYS if config.algorithm.old_log_prob == "rollout" else {})
    refuse(config.verl_overrides, decided, config.source)
    tree = ppo_defaults()
    for key, value in (ppo_keys(config, platform) | _resume_keys(resume)).items():
        # force_add: verl's YAML lacks some documented keys (arguments of Ray and of the engines).
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    for key, value in config.verl_overrides.items():
        if OmegaConf.select(tree, key, default=tree) is tree:
            raise ConfigError(
                f"{config.source}: [verl_overrides] {key} is not a key of verl {verl.__version__}'s tree."
            )
        OmegaConf.update(tree, key, value, merge=False)
    return tree


def ppo_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    return {
        **algorithm_keys(config),
        **_actor_keys(config, platform),
        **_critic_keys(config, platform),
        **_reference_keys(config, platform),
        **rollout_keys(config, platform),
        **sampler_keys(config),
        **_reward_keys(config),
        **_trainer_keys(config, platform),
        **async_keys(config, platform),
    }


def _actor_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    actor = "actor_rollout_ref.actor."
    keys: dict[str, Any] = {
        "actor_rollout_ref.model.path": config.model.path,
        **template_keys(config, "actor_rollout_ref.model."),
        "actor_rollout_ref.model.external_lib": platform.training.external_lib,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.use_fused_kernels": config.memory.fused_cross_entropy,
        actor + "ppo_mini_batch_size": config.train.mini_batch_prompts,
        actor + "use_dynamic_bsz": True,
        actor + "ppo_max_token_len_per_gpu": config.train.micro_batch_tokens,
        actor + "checkpoint.save_contents": ["model", "optimizer", "extra"],
        actor + "checkpoint.async_save": config.checkpoint.asynchronous,
    }
    if config.algorithm.router_replay != "off":
        keys[actor + "megatron.router_replay.mode"] = config.algorithm.router_replay
    return keys | _engine_keys(actor, config, platform) | _optimizer_keys(actor, config, config.critic.warmup_steps)


def _critic_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    if config.algorithm.name != "ppo":
        return {}
    return {
        "critic.model.path": config.model.path,
        **template_keys(config, "critic.model."),
        "critic.model.external_lib": platform.training.external_lib,
        "critic.model.use_remove_padding": True,
        # verl 0.9.1's trainer uses this key for training, too.
        "critic.ppo_infer_max_token_len_per_gpu": config.train.micro_batch_tokens,
        "critic.cliprange_value": config.critic.clip_value,
        "critic.checkpoint.save_contents": ["model", "optimizer", "extra"],
        "critic.checkpoint.async_save": config.checkpoint.asynchronous,
        **_engine_keys("critic.", config, platform),
        **_optimizer_keys("critic.", config),
        "critic.optim.lr": config.critic.lr,
        "critic.optim.min_lr": min(config.optim.min_lr, config.critic.lr),
        "trainer.max_critic_ckpt_to_keep": None,
    }


def _reference_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    return _engine_keys("actor_rollout_ref.ref.", config, platform) if config.algorithm.kl_coef else {}


def _engine_keys(role: str, config: RlConfig, platform: Platform) -> dict[str, Any]:
    """The engine of one role ("critic."): every role has the same Megatron layout."""
    megatron = megatron_keys(config, platform)
    transformer = megatron.pop("override_transformer_config")
    keys: dict[str, Any] = {f"{role}megatron._target_": platform.training.engine_config_class}
    keys |= {f"{role}megatron.{key}": value for key, value in megatron.items()}
    keys |= {f"{role}megatron.override_transformer_config.{key}": value for key, value in transformer.items()}
    return keys


def _optimizer_keys(role: str, config: RlConfig, idle_steps: int = 0) -> dict[str, Any]:
    """``idle_steps``: steps at the start in which this role is not trained."""
    updates = (config.train.steps - idle_steps) * config.train.updates_per_step
    return {f"{role}optim.{key}": value for key, value in optim_keys(config, updates).items()}


def _reward_keys(config: RlConfig) -> dict[str, Any]:
    return {
        "reward.num_workers": config.reward.workers,
        "reward.custom_reward_function.path": str(VERL / "reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "reward.custom_reward_function.reward_kwargs": {RUN_CONFIG: str(config.run.config_file)},
    }


def _trainer_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    run_dir = config.run.dir.absolute()
    keys: dict[str, Any] = {
        "data.train_files": [str(Path(path).absolute()) for path in parquet_files(config.data.train_file)],
        "data.val_files": [str(Path(path).absolute()) for path in config.validation.files],
        "data.train_batch_size": config.train.prompts_per_step,
        "data.max_prompt_length": config.data.max_prompt_tokens,
        "data.max_response_length": config.rollout.max_response_tokens,
        "data.custom_cls.path": str(VERL / "dataset.py"),
        "data.custom_cls.name": "ReToolDataset",
        "data.return_raw_chat": True,
        "data.seed": config.run.seed,
        "data.truncation": "error",
        "data.dataloader_num_workers": 0,  # prompts are a few strings; worker processes cost more than they bring
        "trainer.device": platform.device.name,
        "trainer.nnodes": config.cluster.nodes,
        "trainer.n_gpus_per_node": config.cluster.gpus_per_node,
        "trainer.total_training_steps": config.train.steps,
        "trainer.total_epochs": 1_000_000,  # steps decide, not epochs
        "trainer.project_name": "retool",
        "trainer.experiment_name": config.run.name,
        "trainer.logger": ["console"],  # run/metrics.py writes files: verl's would keep what a resumed run repeats
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "trainer.rollout_data_dir": None,
        "trainer.save_freq": config.checkpoint.every_steps or -1,
        "trainer.max_actor_ckpt_to_keep": None,  # run/checkpoint.py deletes old ones, also after a restart
        "trainer.test_freq": config.validation.every or -1,
        "trainer.val_before_train": False,
        "trainer.v1.trainer_mode": TRAINER_MODES[config.train.mode],
        _RUN_CONFIG_KEY: str(config.run.config_file),
    }
    if not platform.host.has_devices:
        keys |= _small_machine_keys()
    if config.cluster.nodes > 1:
        # Workers on other nodes inherit the environment of their shells; verl passes this one to
        # every process of the run.
        keys["ray_kwargs.ray_init.runtime_env.env_vars"] = platform.process_env()
    elif not platform.host.has_devices:
        keys |= _local_ray_keys(config)
    return keys


def _local_ray_keys(config: RlConfig) -> dict[str, Any]:
    """Ray as verl starts it on one machine without devices.

    On several nodes the launch scripts start Ray.
    """
    return {
        "ray_kwargs.ray_init.num_cpus": 16,  # logical: actors that mostly wait, on however few cores
        "ray_kwargs.ray_init.num_gpus": config.cluster.gpus_per_node,  # logical: one per Megatron or engine process
        "ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init.object_store_memory": 300_000_000,
    }


def _small_machine_keys() -> dict[str, Any]:
    """The transfer queue on a machine where every process counts."""
    return {
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "transfer_queue.backend.SimpleStorage.total_storage_size": 4_000,
    }


def _resume_keys(resume: Path | None) -> dict[str, Any]:
    """Tell verl the path to resume from, or not to resume.

    run/checkpoint.py decides which checkpoint is complete.
    """
    if resume is None:
        return {"trainer.resume_mode": "disable"}
    # resume_from_path alone does nothing in verl.
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(resume.absolute())}


def run_config_of(tree: DictConfig) -> str:
    """The path of the run's settings, as verl's tree names it to our trainer."""
    from omegaconf import OmegaConf

    return str(OmegaConf.select(tree, _RUN_CONFIG_KEY))
