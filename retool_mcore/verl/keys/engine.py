"""verl's keys for Megatron's engine, optimizer and model, in SFT and in each role of RL."""

from typing import Any

from retool_mcore.config import RunConfig
from retool_mcore.data.tokenizer import template_of
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.key import NOT_SET, OUR_CODE, Key, from_setting, values

LORA_SECTION = "the section [lora]"
# The bridge reads the expert's number from the weight's name in Transformer Engine's grouped layer.
GROUPED = "Megatron-Bridge, which needs the grouped expert layer"
TRANSFORMER, DDP, ADAM = "override_transformer_config", "override_ddp_config", "override_optimizer_config"
OPTION = f"{TRANSFORMER}."  # verl passes these keys to Megatron's TransformerConfig


def _sequence_parallel(run: RunConfig, *_: Any) -> bool:
    """Use sequence parallelism whenever TP > 1.

    Without it each TP rank stores the norms' activations for all tokens. Megatron trains experts
    under TP only with it, and the fused cross entropy relies on it to sum the gradient of the last
    hidden states over the ranks.
    """
    return run.parallel.tp > 1


def _recomputes(run: RunConfig, *_: Any) -> bool:
    # With "auto", verl/recompute.py sets Megatron's options for each micro-batch instead.
    return run.memory.recomputes_layers


def _balances(run: RunConfig, *_: Any) -> bool:
    return bool(run.experts.load_balancing)


def _balancing(part: int) -> Any:
    return lambda run, _: next(iter(run.experts.load_balancing.items()))[part]


def chat_template(run: RunConfig, *_: Any) -> Any:
    """The chat template for verl's tokenizers, which verl also writes into checkpoints.

    NOT_SET for the model's own template, because the model's files may not be on this machine.
    """
    template = template_of(run.model)
    return NOT_SET if template is None else template


def _has_adapters(run: RunConfig, *_: Any) -> bool:
    return run.lora.rank > 0


def _lora(run: RunConfig, *_: Any) -> dict[str, Any]:
    return {"merge": True, "dropout": run.lora.dropout, "base_precision": run.lora.base_precision}


def _trains_in_fp8(run: RunConfig, *_: Any) -> bool:
    return run.model.fp8 != "off"


# Fields of verl's McoreEngineConfig; the functions take the run and its platform.
MEGATRON = (
    Key("_target_", "run.platform"),  # RL sets the class in its tree, SFT instantiates it
    from_setting("tensor_model_parallel_size", "parallel.tp"),
    from_setting("pipeline_model_parallel_size", "parallel.pp"),
    Key(
        "virtual_pipeline_model_parallel_size",
        "parallel.vpp",
        lambda run, _: run.parallel.vpp if run.parallel.vpp > 1 else None,
    ),
    from_setting("context_parallel_size", "parallel.cp"),
    from_setting("expert_model_parallel_size", "parallel.ep"),
    Key("expert_tensor_parallel_size", "parallel.etp", lambda run, _: run.parallel.etp or None),  # None: as tp
    Key("sequence_parallel", "parallel.tp", _sequence_parallel),
    Key("use_distributed_optimizer", None, True),
    Key("use_mbridge", None, True),
    Key("vanilla_mbridge", OUR_CODE, False),  # mbridge is not installed
    from_setting("dtype", "model.dtype"),
    from_setting("seed", "run.seed"),
    from_setting("dist_ckpt_optim_fully_reshardable", "checkpoint.reshardable"),
    # Gather the states on one rank per data-parallel group, in host memory. Otherwise Megatron
    # gathers them on every rank of the group.
    from_setting("distrib_optim_fully_reshardable_mem_efficient", "checkpoint.reshardable"),
    from_setting("param_offload", "memory.offload_idle"),
    from_setting("optimizer_offload", "memory.offload_idle"),
    Key(DDP, None, lambda _, platform: dict(platform.training.ddp_options)),
    Key(OPTION + "sequence_parallel", "parallel.tp", _sequence_parallel),  # MindSpeed reads it here
    Key(OPTION + "recompute_granularity", "memory.recompute", "full", when=_recomputes),
    Key(
        OPTION + "recompute_method",
        "memory.recompute",
        lambda run, _: "block" if run.memory.recomputed_layers else "uniform",
        when=_recomputes,
    ),
    Key(
        OPTION + "recompute_num_layers",
        "memory.recompute",
        lambda run, _: run.memory.recomputed_layers or 1,
        when=_recomputes,
    ),
    # Dense models ignore the moe_* keys. For keys not set here, the defaults of verl and of
    # Megatron-Bridge apply: no load-balancing loss, and grouped GEMM.
    # Router in fp32: in bfloat16 two experts' scores are often equal, so the choice is arbitrary.
    Key(OPTION + "moe_router_dtype", None, "fp32"),
    Key(OPTION + "moe_router_load_balancing_type", "experts.load_balancing", _balancing(0), when=_balances),
    Key(OPTION + "moe_aux_loss_coeff", "experts.load_balancing", _balancing(1), when=_balances),
    Key(OPTION + "moe_grouped_gemm", GROUPED),
    Key(OPTION + "fp8", "model.fp8", "hybrid", when=_trains_in_fp8),
    from_setting(OPTION + "fp8_recipe", "model.fp8", when=_trains_in_fp8),
)


def megatron_keys(config: RunConfig, platform: Platform) -> dict[str, Any]:
    """Keys of verl's McoreEngineConfig, including its tables of Megatron's own options."""
    kernels = {OPTION + name: value for name, value in platform.training.transformer_options.items()}
    return kernels | values(MEGATRON, config, platform)


def _moments(run: RunConfig, _: int) -> str:
    return "fp32" if run.memory.adam_states == "compact" else "bf16"


def _compact(run: RunConfig, _: int) -> bool:
    return run.memory.adam_states != "float32"


def _keeps_optimizer_on_cpu(run: RunConfig, _: int) -> bool:
    return bool(run.memory.optimizer_on_cpu)


# Fields of verl's McoreOptimizerConfig; the functions take the run and its number of updates, which
# is the length of the schedule.
OPTIMIZER = (
    from_setting("lr", "optim.lr"),
    from_setting("min_lr", "optim.min_lr"),
    from_setting("lr_decay_style", "optim.schedule"),
    Key("lr_decay_steps", "train.steps", lambda _, updates: updates),
    Key("lr_warmup_steps", "optim.warmup_fraction", lambda run, updates: round(run.optim.warmup_fraction * updates)),
    Key("lr_warmup_steps_ratio", "optim.warmup_fraction"),
    from_setting("weight_decay", "optim.weight_decay"),
    from_setting("clip_grad", "optim.clip_grad"),
    Key("total_training_steps", "train.steps", lambda _, updates: updates),
    # Without this key verl 0.9.1 saves the schedule but does not load it, so a resumed run would
    # repeat its warm-up.
    Key("use_checkpoint_opt_param_scheduler", None, True),
    # Megatron then also stores each master weight as the bfloat16 weight and its 16 remaining bits.
    Key("use_precision_aware_optimizer", "memory.adam_states", True, when=_compact),
    Key("exp_avg_dtype", "memory.adam_states", _moments, when=_compact),
    Key("exp_avg_sq_dtype", "memory.adam_states", _moments, when=_compact),
    # verl 0.9.1 passes `betas` only to Muon. Adam uses Megatron's defaults, so we set Megatron's
    # options below.
    Key("betas", "optim.betas"),
    Key(f"{ADAM}.adam_beta1", "optim.betas", lambda run, _: run.optim.betas[0]),
    Key(f"{ADAM}.adam_beta2", "optim.betas", lambda run, _: run.optim.betas[1]),
    # Keep and update optimizer states in host memory.
    Key(f"{ADAM}.optimizer_cpu_offload", "memory.optimizer_on_cpu", True, when=_keeps_optimizer_on_cpu),
    from_setting(f"{ADAM}.optimizer_offload_fraction", "memory.optimizer_on_cpu", when=_keeps_optimizer_on_cpu),
    Key(f"{ADAM}.overlap_cpu_optimizer_d2h_h2d", "memory.optimizer_on_cpu", True, when=_keeps_optimizer_on_cpu),
    # Megatron's CPU-offloading optimizer requires it.
    Key(f"{ADAM}.use_precision_aware_optimizer", "memory.optimizer_on_cpu", True, when=_keeps_optimizer_on_cpu),
)
# Fields of verl's HFModelConfig, for SFT and the actor. The functions take the run and its
# platform.
MODEL = (
    from_setting("path", "model.path"),
    Key("custom_chat_template", "model.chat_template", chat_template),
    Key("external_lib", "run.platform", lambda _, platform: platform.training.external_lib),
    Key("use_remove_padding", None, True),
    from_setting("use_fused_kernels", "memory.fused_cross_entropy"),
    # With lora_rank > 0, verl's trainer uses the actor without adapters as the reference. With
    # lora.merge, it sends merged weights to engines. verl/lora.py reads the other keys. verl's
    # lora.rank stays 0, or verl calls Megatron-Bridge.
    Key("lora_rank", LORA_SECTION, lambda run, _: run.lora.rank, when=_has_adapters),
    Key("lora_alpha", LORA_SECTION, lambda run, _: run.lora.alpha, when=_has_adapters),
    Key("target_modules", LORA_SECTION, lambda run, _: run.lora.matrices, when=_has_adapters),
    Key("lora", LORA_SECTION, _lora, when=_has_adapters),
    *(Key(name, LORA_SECTION) for name in ("lora_adapter_path", "exclude_modules")),
)
# Only for SFT's engine.
SFT_BATCHES = (
    Key("use_dynamic_bsz", "train.micro_batch_tokens", True),
    from_setting("max_token_len_per_gpu", "train.micro_batch_tokens"),
    from_setting("infer_max_token_len_per_gpu", "train.micro_batch_tokens"),
)
