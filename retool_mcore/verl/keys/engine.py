"""verl's keys for Megatron: engine, optimizer and model, for SFT's engine and each role of RL."""

from typing import Any

from retool_mcore.config import RunConfig
from retool_mcore.data.tokenizer import template_of
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.key import NOT_SET, OWN_PART, Key, same, values

# verl's own adapters on Megatron need Megatron-Bridge (workers/config/megatron_peft.py).
OWN_LORA = "the section [lora], because this trainer's adapters are its own and not verl's,"
# It reads from a weight's name in Transformer Engine's grouped layer which expert the weight is of.
GROUPED = "this trainer, whose bridge knows the experts' weights by the names of their grouped layer,"
TRANSFORMER, DDP, ADAM = "override_transformer_config", "override_ddp_config", "override_optimizer_config"
OPTION = f"{TRANSFORMER}."  # what verl hands on to Megatron's TransformerConfig


def _sequence_parallel(run: RunConfig, *_: Any) -> bool:
    """Wherever there is TP: without it each rank keeps the norms' activations whole.

    Experts are trained under TP that way only, and the fused cross entropy sums the gradient of the
    last hidden states over the ranks there.
    """
    return run.parallel.tp > 1


def _recomputes(*levels: str) -> Any:
    # "auto" sets Megatron's keys anew for each micro-batch
    return lambda run, _: _granularity(run) in levels


def _granularity(run: RunConfig, *_: Any) -> str:
    return "full" if run.memory.recomputes_layers else str(run.memory.recompute)


def _balances(run: RunConfig, *_: Any) -> bool:
    return bool(run.experts.load_balancing)


def _balancing(part: int) -> Any:
    return lambda run, _: next(iter(run.experts.load_balancing.items()))[part]


def chat_template(run: RunConfig, *_: Any) -> Any:
    """verl makes its tokenizers with it, and writes it into checkpoints.

    Not set where it is the model's own, whose text may not be here.
    """
    template = template_of(run.model)
    return NOT_SET if template is None else template


def _has_adapters(run: RunConfig, *_: Any) -> bool:
    return run.lora.rank > 0


def _lora(run: RunConfig, *_: Any) -> dict[str, Any]:
    return {"merge": True, "dropout": run.lora.dropout, "base_precision": run.lora.base_precision}


def _in_fp8(run: RunConfig, *_: Any) -> bool:
    return run.model.fp8 != "off"


# Of verl's McoreEngineConfig; the functions take the run and its platform.
MEGATRON = (
    Key("_target_", "run.platform"),  # RL names the class in its tree, SFT makes it
    same("tensor_model_parallel_size", "parallel.tp"),
    same("pipeline_model_parallel_size", "parallel.pp"),
    Key(
        "virtual_pipeline_model_parallel_size",
        "parallel.vpp",
        lambda run, _: run.parallel.vpp if run.parallel.vpp > 1 else None,
    ),
    same("context_parallel_size", "parallel.cp"),
    same("expert_model_parallel_size", "parallel.ep"),
    Key("expert_tensor_parallel_size", "parallel.etp", lambda run, _: run.parallel.etp or None),  # None: as tp
    Key("sequence_parallel", "parallel.tp", _sequence_parallel),
    Key("use_distributed_optimizer", None, True),
    Key("use_mbridge", None, True),
    Key("vanilla_mbridge", OWN_PART, True),  # ARCHITECTURE.md, "The bridge"
    same("dtype", "model.dtype"),
    same("seed", "run.seed"),
    same("dist_ckpt_optim_fully_reshardable", "checkpoint.reshardable"),
    # Gather on one host process; Megatron's other way gives every rank all states of its
    # data-parallel group.
    same("distrib_optim_fully_reshardable_mem_efficient", "checkpoint.reshardable"),
    same("param_offload", "memory.offload_idle"),
    same("optimizer_offload", "memory.offload_idle"),
    Key(DDP, None, lambda _, platform: dict(platform.training.ddp_options)),
    # mbridge takes it from here, and defaults to on
    Key(OPTION + "sequence_parallel", "parallel.tp", _sequence_parallel),
    Key(
        OPTION + "context_parallel_size",
        "parallel.cp",
        lambda run, _: run.parallel.cp,
        when=lambda run, _: run.parallel.cp > 1,
    ),
    Key(
        OPTION + "recompute_granularity",
        "memory.recompute",
        _granularity,
        when=_recomputes("selective", "full"),
    ),
    # Flash attention keeps no score matrix, so the attention core has nothing to recompute.
    Key(OPTION + "recompute_modules", None, ["layernorm"], when=_recomputes("selective")),
    Key(
        OPTION + "recompute_method",
        "memory.recompute",
        lambda run, _: "block" if run.memory.recomputed_layers else "uniform",
        when=_recomputes("full"),
    ),
    Key(
        OPTION + "recompute_num_layers",
        "memory.recompute",
        lambda run, _: run.memory.recomputed_layers or 1,
        when=_recomputes("full"),
    ),
    # A dense model ignores these. What is left out has mbridge's values: no load-balancing loss,
    # and grouped products wherever there is Transformer Engine.
    # In bfloat16 the scores of two experts are often equal, and chance decides which a token gets.
    Key(OPTION + "moe_router_dtype", None, "fp32"),
    Key(
        OPTION + "moe_router_load_balancing_type",
        "experts.load_balancing",
        _balancing(0),
        when=_balances,
    ),
    Key(
        OPTION + "moe_aux_loss_coeff",
        "experts.load_balancing",
        _balancing(1),
        when=_balances,
    ),
    Key(OPTION + "moe_grouped_gemm", GROUPED),
    Key(OPTION + "fp8", "model.fp8", "hybrid", when=_in_fp8),
    Key(OPTION + "fp8_recipe", "model.fp8", lambda run, _: run.model.fp8, when=_in_fp8),
)


def megatron_keys(config: RunConfig, platform: Platform) -> dict[str, Any]:
    """Keys of verl's McoreEngineConfig, and below them what Megatron's own classes take."""
    kernels = {OPTION + name: value for name, value in platform.training.transformer_options.items()}
    return kernels | values(MEGATRON, config, platform)


def _moments(run: RunConfig, _: int) -> str:
    return "fp32" if run.memory.adam_states == "compact" else "bf16"


def _compact(run: RunConfig, _: int) -> bool:
    return run.memory.adam_states != "float32"


def _on_cpu(run: RunConfig, _: int) -> bool:
    return bool(run.memory.optimizer_on_cpu)


# Of verl's McoreOptimizerConfig; the functions take the run and how many updates it makes, which
# the schedule counts.
OPTIMIZER = (
    same("lr", "optim.lr"),
    same("min_lr", "optim.min_lr"),
    same("lr_decay_style", "optim.schedule"),
    Key("lr_decay_steps", "train.steps", lambda _, updates: updates),
    Key("lr_warmup_steps", "optim.warmup_fraction", lambda run, updates: round(run.optim.warmup_fraction * updates)),
    Key("lr_warmup_steps_ratio", "optim.warmup_fraction"),
    same("weight_decay", "optim.weight_decay"),
    same("clip_grad", "optim.clip_grad"),
    Key("total_training_steps", "train.steps", lambda _, updates: updates),
    # Without this key verl 0.9.1 saves the schedule but does not load it, and a resumed run starts
    # its warm-up again.
    Key("use_checkpoint_opt_param_scheduler", None, True),
    # Megatron then also stores a master weight as the bfloat16 weight and its 16 missing bits.
    Key("use_precision_aware_optimizer", "memory.adam_states", True, when=_compact),
    Key("exp_avg_dtype", "memory.adam_states", _moments, when=_compact),
    Key("exp_avg_sq_dtype", "memory.adam_states", _moments, when=_compact),
    # verl 0.9.1 passes its own `betas` to Muon only; Adam uses Megatron's defaults unless they are
    # set below.
    Key("betas", "optim.betas"),
    Key(f"{ADAM}.adam_beta1", "optim.betas", lambda run, _: run.optim.betas[0]),
    Key(f"{ADAM}.adam_beta2", "optim.betas", lambda run, _: run.optim.betas[1]),
    # States that live and are updated on the host.
    Key(f"{ADAM}.optimizer_cpu_offload", "memory.optimizer_on_cpu", True, when=_on_cpu),
    Key(
        f"{ADAM}.optimizer_offload_fraction",
        "memory.optimizer_on_cpu",
        lambda run, _: run.memory.optimizer_on_cpu,
        when=_on_cpu,
    ),
    Key(f"{ADAM}.overlap_cpu_optimizer_d2h_h2d", "memory.optimizer_on_cpu", True, when=_on_cpu),
    # The offloading optimizer takes gradients that way only.
    Key(f"{ADAM}.use_precision_aware_optimizer", "memory.optimizer_on_cpu", True, when=_on_cpu),
)
# Of verl's HFModelConfig, for SFT and the actor; the functions take the run and its platform.
MODEL = (
    same("path", "model.path"),
    Key("custom_chat_template", "model.chat_template", chat_template),
    Key("external_lib", "run.platform", lambda _, platform: platform.training.external_lib),
    Key("use_remove_padding", None, True),
    same("use_fused_kernels", "memory.fused_cross_entropy"),
    # verl's trainer takes from lora_rank that the actor without its adapters is the reference, and
    # from lora.merge that engines get whole weights; verl/lora.py reads the others. lora.rank stays
    # 0: with it verl would call Megatron-Bridge.
    Key("lora_rank", OWN_LORA, lambda run, _: run.lora.rank, when=_has_adapters),
    Key("lora_alpha", OWN_LORA, lambda run, _: run.lora.alpha, when=_has_adapters),
    Key("target_modules", OWN_LORA, lambda run, _: run.lora.matrices, when=_has_adapters),
    Key("lora", OWN_LORA, _lora, when=_has_adapters),
    *(Key(name, OWN_LORA) for name in ("lora_adapter_path", "exclude_modules")),
)
# Of SFT's engine alone.
SFT_BATCHES = (
    Key("use_dynamic_bsz", "train.micro_batch_tokens", True),
    same("max_token_len_per_gpu", "train.micro_batch_tokens"),
    same("infer_max_token_len_per_gpu", "train.micro_batch_tokens"),
)
