"""Raw verl keys that [verl_overrides] may not set, because a setting of ours decides them.

If they were set raw, they would silently contradict the run's own settings, from which the sampler,
the schedule and the metrics are made. Keys for which our mapping only changes the default may be
set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retool_mcore.errors import ConfigError

OLD_LOG_PROB = 'algorithm.old_log_prob = "actor" or "rollout"'
LENGTH = "rollout.max_response_tokens"
NODES = "the section [cluster] and rollout.gpus"
OWN_PART = "this trainer, which relies on a part of its own there,"
# verl trains adapters on Megatron through Megatron-Bridge alone (workers/config/megatron_peft.py).
# With mbridge it ignores lora_rank, and asserts on lora.rank once it has started.
NO_LORA = "this trainer, which trains whole weights because verl's adapters need Megatron-Bridge and not mbridge,"
# It reads from a weight's name in Transformer Engine's grouped layer which expert the weight is of.
GROUPED = "this trainer, whose bridge knows the experts' weights by the names of their grouped layer,"

MEGATRON = {  # under each role's engine
    "_target_": "run.platform",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "sequence_parallel": "parallel.sequence_parallel",
    "vanilla_mbridge": OWN_PART,
    "dtype": "model.dtype",
    "seed": "run.seed",
    "dist_ckpt_optim_fully_reshardable": "checkpoint.reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": "checkpoint.reshardable",
    "param_offload": "memory.offload_idle",
    "optimizer_offload": "memory.offload_idle",
    "override_transformer_config.sequence_parallel": "parallel.sequence_parallel",
    "override_transformer_config.context_parallel_size": "parallel.cp",
    "override_transformer_config.recompute_granularity": "memory.recompute",
    "override_transformer_config.recompute_method": "memory.recompute_layers",
    "override_transformer_config.recompute_num_layers": "memory.recompute_layers",
    "override_transformer_config.moe_router_dtype": "experts.router_dtype",
    "override_transformer_config.moe_router_load_balancing_type": "experts.load_balancing",
    "override_transformer_config.moe_aux_loss_coeff": "experts.aux_loss_coef",
    "override_transformer_config.moe_permute_fusion": "experts.permute_fusion",
    "override_transformer_config.moe_grouped_gemm": GROUPED,
    "override_transformer_config.fp8": "model.fp8",
    "override_transformer_config.fp8_recipe": "model.fp8",
}
OPTIMIZER = {  # under each role's optimizer
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "lr_decay_style": "optim.schedule",
    "lr_decay_steps": "train.steps",
    "lr_warmup_steps": "optim.warmup_fraction",
    "lr_warmup_steps_ratio": "optim.warmup_fraction",
    "total_training_steps": "train.steps",
    "weight_decay": "optim.weight_decay",
    "betas": "optim.beta1 and optim.beta2",
    "clip_grad": "optim.clip_grad",
    "use_precision_aware_optimizer": "memory.adam_states",
    "exp_avg_dtype": "memory.adam_states",
    "exp_avg_sq_dtype": "memory.adam_states",
    "override_optimizer_config.adam_beta1": "optim.beta1",
    "override_optimizer_config.adam_beta2": "optim.beta2",
    "override_optimizer_config.optimizer_cpu_offload": "memory.optimizer_on_cpu",
    "override_optimizer_config.optimizer_offload_fraction": "memory.optimizer_on_cpu",
}
ADAPTERS = ("lora", "lora_rank", "lora_alpha", "lora_adapter_path", "target_modules", "exclude_modules")
MODEL = {
    "path": "model.path",
    "custom_chat_template": "model.chat_template",
    "external_lib": "run.platform",
    "use_fused_kernels": "memory.fused_cross_entropy",
    **dict.fromkeys(ADAPTERS, NO_LORA),
}
ALGORITHM = {
    "adv_estimator": "algorithm.name",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "filter_groups": "algorithm.filter_groups",
    "use_kl_in_reward": "algorithm.kl_in",
    "kl_penalty": "algorithm.kl_type",
    "kl_ctrl.kl_coef": "algorithm.kl_coef",
    "rollout_correction.rollout_is": "algorithm.importance_sampling",
    "rollout_correction.rollout_is_threshold": "algorithm.importance_threshold and algorithm.importance_low",
    "rollout_correction.rollout_rs": "algorithm.rejection",
    "rollout_correction.rollout_rs_threshold": "algorithm.rejection_low and algorithm.rejection_high",
    "rollout_correction.bypass_mode": OLD_LOG_PROB,
    "rollout_correction.loss_type": OLD_LOG_PROB,
}
# Refused only with algorithm.old_log_prob = "rollout": with "actor" the rest of verl's table holds
# what losses of verl's read that no setting of ours names.
ENGINE_LOG_PROB_KEYS = {"actor_rollout_ref.actor.policy_loss": OLD_LOG_PROB}
ACTOR = {
    "use_kl_loss": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_type",
    "policy_loss.loss_mode": "algorithm.loss",
    "tau_pos": "algorithm.tau_pos",
    "tau_neg": "algorithm.tau_neg",
    "loss_scale_factor": "algorithm.loss_agg",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.clip_c",
    "loss_agg_mode": "algorithm.loss_agg",
    "use_rollout_log_probs": OLD_LOG_PROB,
    "ppo_mini_batch_size": "train.mini_batch_prompts",
    "use_dynamic_bsz": "train.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "checkpoint.async_save": "checkpoint.asynchronous",
    "megatron.router_replay": "algorithm.router_replay",
}
CRITIC = {
    "model.path": "model.path",
    "model.custom_chat_template": "model.chat_template",
    "model.external_lib": "run.platform",
    "cliprange_value": "critic.clip_value",
    "ppo_mini_batch_size": "train.mini_batch_prompts",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "ppo_infer_max_token_len_per_gpu": "train.micro_batch_tokens",
    "checkpoint.async_save": "checkpoint.asynchronous",
}
ROLLOUT = {
    "name": "run.platform",
    "n": "rollout.group_size",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "prompt_length": "data.max_prompt_tokens",
    "response_length": LENGTH,
    "max_model_len": f"data.max_prompt_tokens and {LENGTH}",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_model_parallel_size": "rollout.engine_tp",
    "gpu_memory_utilization": "rollout.engine_memory_fraction",
    "max_num_seqs": "rollout.max_running_requests",
    "quantization": "rollout.precision",
    "calculate_log_probs": OWN_PART,
    "enable_rollout_routing_replay": "algorithm.router_replay",
    "load_format": OWN_PART,
    "nnodes": NODES,
    "n_gpus_per_node": NODES,
    "checkpoint_engine.backend": "run.platform",
    "checkpoint_engine.custom_backend_module": "run.platform",
    "router_config_path": OWN_PART,
    "agent.num_workers": "rollout.agent_workers",
    "agent.default_agent_loop": OWN_PART,
    "multi_turn.max_assistant_turns": "rollout.max_turns",
    "val_kwargs": "the section [validation]",
    "engine_kwargs.sglang": "rollout.engine_args",
}
TRAINER = {
    "device": "run.platform",
    "nnodes": NODES,
    "n_gpus_per_node": NODES,
    "total_training_steps": "train.steps",
    "total_epochs": "train.steps",
    "experiment_name": "run.name",
    "critic_warmup": "critic.warmup_steps",
    "default_local_dir": "run.root and run.name",
    "save_freq": "checkpoint.every_steps",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "max_critic_ckpt_to_keep": "checkpoint.keep",
    "test_freq": "validation.every",
    "resume_mode": "checkpoint.resume",
    "resume_from_path": "checkpoint.resume",
    "retool_config": "run.root and run.name",
    "v1.trainer_mode": "train.mode",
    "v1.sampler.custom_sampler": OWN_PART,
    "v1.sampler.sampler_kwargs": "the sections [rollout], [train] and [validation]",
    "v1.sampler.max_off_policy_threshold": "train.max_staleness",
    "v1.sampler.max_off_policy_strategy": "train.when_stale",
    "v1.colocate_async.num_warmup_batches": "train.prefetch_batches",
    "v1.separate_async.num_warmup_batches": "train.prefetch_batches",
    "v1.separate_async.parameter_sync_step": "train.prompts_per_step and train.mini_batch_prompts",
}
DATA = {
    "train_files": "data.train_file",
    "val_files": "validation.files",
    "train_batch_size": "train.prompts_per_step",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": LENGTH,
    "seed": "run.seed",
    "custom_cls": OWN_PART,
}
REWARD = {"num_workers": "reward.workers", "custom_reward_function": "the section [reward]"}


def _under(prefix: str, table: Mapping[str, str]) -> dict[str, str]:
    return {prefix + key: setting for key, setting in table.items()}


SFT_BATCHES = {
    "engine.use_dynamic_bsz": "train.micro_batch_tokens",
    "engine.max_token_len_per_gpu": "train.micro_batch_tokens",
    "engine.infer_max_token_len_per_gpu": "train.micro_batch_tokens",
}
SFT_KEYS = SFT_BATCHES | _under("engine.", MEGATRON) | _under("optim.", OPTIMIZER) | _under("model.", MODEL)
RL_KEYS: dict[str, str] = {
    **_under("algorithm.", ALGORITHM),
    **_under("actor_rollout_ref.model.", MODEL),
    **_under("actor_rollout_ref.actor.", ACTOR),
    **_under("critic.", CRITIC),
    **_under("actor_rollout_ref.rollout.", ROLLOUT),
    **_under("trainer.", TRAINER),
    **_under("data.", DATA),
    **_under("reward.", REWARD),
    "actor_rollout_ref.hybrid_engine": "train.mode",
    "ray_kwargs.ray_init.num_gpus": "cluster.gpus_per_node",
}
for _role in ("actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic."):
    RL_KEYS |= _under(f"{_role}megatron.", MEGATRON) | _under(f"{_role}optim.", OPTIMIZER)
RL_KEYS |= {"critic.optim.lr": "critic.lr", "critic.optim.min_lr": "critic.lr and optim.min_lr"}


def refuse(overrides: Mapping[str, Any], decided: Mapping[str, str], source: str) -> None:
    """Raise one ConfigError for all keys of [verl_overrides] that are in ``decided``.

    ``decided`` maps a key to our setting. A table that contains such a key, or a key below it, is
    refused as well: it is the same value.
    """
    found = {key: setting for key in overrides if (setting := decided_by(key, decided))}
    if found:
        told = "; ".join(f"{key} = {overrides[key]!r}: {setting} decides it" for key, setting in found.items())
        raise ConfigError(f"{source}: [verl_overrides] refuses {told}. Leave the raw key out, and set what decides it.")


def decided_by(key: str, decided: Mapping[str, str]) -> str | None:
    """The settings that decide a raw key, or None."""
    if key in decided:
        return decided[key]
    above = [ours for ours in decided if key.startswith(f"{ours}.")]
    if above:
        return decided[max(above, key=len)]
    below = {decided[ours]: None for ours in decided if ours.startswith(f"{key}.")}
    return " and ".join(below) or None
