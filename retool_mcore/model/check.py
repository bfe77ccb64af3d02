"""Checks a run's configuration against its model, without starting an engine."""

from math import ceil
from pathlib import Path
from typing import Any

from retool_mcore.config import Experts, RlConfig, RunConfig, SftConfig
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.families import check_engine_fields, check_fields, check_window
from retool_mcore.model.files import check_files, fetch_config, highest_token, read_config, tensor_files
from retool_mcore.model.rope import rope_of_config
from retool_mcore.model.shape import (
    ModelShape,
    layers_to_recompute,
    micro_batch_tokens,
    shape_of_config,
    token_memory,
)
from retool_mcore.model.tensors import EMBEDDING, HEAD, check_headers, check_tensors, same_tensor, trained_tensors


def check_model(config: RunConfig) -> None:
    """Check that the parallel layout and the lengths fit the model.

    Fetches the config.json of a hub name. Raises ConfigError with the arithmetic, and
    CheckpointError if config.json is unavailable, because the run could not load the model either.
    """
    values = read_config(config.model.path) or fetch_config(config.model.path)
    _check_fields(config, values)
    shape = shape_of_config(values)
    splits = [
        ("parallel.tp", config.parallel.tp, shape.heads, "attention heads"),
        ("parallel.tp", config.parallel.tp, shape.kv_heads, "key-value heads"),
        ("parallel.pp", config.parallel.pp, shape.layers, "layers"),
    ]
    engine = [("rollout.engine_tp", config.rollout.engine_tp)] if isinstance(config, RlConfig) else []
    splits += [(name, ways, shape.heads, "attention heads") for name, ways in engine]
    if shape.delta:
        for name, ways in (("parallel.tp * cp", config.parallel.tp * config.parallel.cp), *engine):
            splits.append((name, ways, shape.delta.key_heads, "key heads of the DeltaNet layers"))
            splits.append((name, ways, shape.delta.value_heads, "value heads of the DeltaNet layers"))
    for name, ways, count, what in splits:
        if count % ways:
            raise ConfigError(
                f"{config.source}: {name} = {ways} does not divide the {count} {what} of {config.model.path}."
            )
    if shape.tied:
        _check_stages_of_tied(config, shape)
    experts = shape.experts
    if config.parallel.ep > 1 and (not experts or experts % config.parallel.ep):
        raise ConfigError(
            f"{config.source}: parallel.ep = {config.parallel.ep} distributes experts, but {config.model.path} has "
            f"{experts or 'none'}. Set parallel.ep to a divisor of the number of experts, or to 1 for a dense model."
        )
    if not experts:
        _check_dense(config)
    delta_layers = shape.delta.layers if shape.delta else 0
    if (experts or delta_layers) and config.lora.rank:
        what = f"{experts} experts" if experts else f"{delta_layers} DeltaNet layers"
        raise ConfigError(
            f"{config.source}: lora.rank = {config.lora.rank}, but {config.model.path} has {what}, which cannot have "
            "adapters. Use a dense model with attention in every layer, or train all weights with lora.rank = 0."
        )
    if delta_layers:
        _check_fp8(config, delta_layers)
    if experts and shape.ffn % config.parallel.expert_tp:
        size = f"{config.parallel.expert_tp}{'' if config.parallel.etp else ' (as tp)'}"
        raise ConfigError(
            f"{config.source}: parallel.etp = {size} does not divide the {shape.ffn} hidden units of an "
            f"expert of {config.model.path}. With 1, experts are not split."
        )
    if experts and isinstance(config, RlConfig):
        _check_old_log_prob(config)
    _check_length(config, values)
    check_recompute(config, shape)
    _check_vocabulary(config.model.path, shape.vocab)
    _check_tensors(config, values)


def _check_fields(config: RunConfig, values: dict[str, Any]) -> None:
    """Raise ConfigError for a config.json field that training would ignore."""
    model = config.model.path
    try:
        check_fields(values, model)
        check_window(values, config.max_sequence_tokens, model)
        if isinstance(config, RlConfig):
            check_engine_fields(values, model)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def _check_tensors(config: RunConfig, values: dict[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint fits the tensors of training.

    Loading checks the weights of a hub name that is not in the cache.
    """
    located = tensor_files(config.model.path)
    if located is None:
        return
    folder, files = located
    check_files(folder)
    check_tensors(files, values, config.model.path)
    check_headers(folder, files, trained_tensors(values), config.model.path)
    if HEAD in files and HEAD not in trained_tensors(values) and not same_tensor(folder, files, EMBEDDING, HEAD):
        raise CheckpointError(
            f"{config.model.path} has tie_word_embeddings = true in its config.json, but its {HEAD} differs from its "
            f"{EMBEDDING}, so training would ignore one of them. Set tie_word_embeddings = false in a copy of its "
            "config.json, or remove the wrong tensor."
        )


def _check_vocabulary(model: str, vocabulary: int) -> None:
    """Raise CheckpointError if the tokenizer has a token id beyond the embedding table."""
    highest = highest_token(Path(model))
    if highest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer of {model} has token id {highest}, but its embedding has only {vocabulary} rows "
            "(vocab_size in config.json). Use a tokenizer and weights of the same model."
        )


def _check_length(config: RunConfig, values: dict[str, Any]) -> None:
    """Raise ConfigError if sequences may exceed the model's maximum positions."""
    longest, wanted = values.get("max_position_embeddings"), config.max_sequence_tokens
    scaled = rope_of_config(values).reach
    if longest is None or wanted <= longest or (wanted <= scaled and not isinstance(config, RlConfig)):
        return
    beyond = f"sequences of {wanted} tokens exceed max_position_embeddings = {longest} of {config.model.path}"
    if wanted <= scaled:
        raise ConfigError(
            f"{config.source}: {beyond}. verl and SGLang apply that limit, although yarn extends it to {scaled}. "
            f"Write max_position_embeddings = {scaled} and original_max_position_embeddings in a copy "
            "of its config.json."
        )
    settings = "data.max_prompt_tokens or rollout.max_response_tokens"
    if not isinstance(config, RlConfig):
        settings = "data.max_length_tokens"
    raise ConfigError(f"{config.source}: {beyond}. Lower {settings}, or use another model.")


def _check_stages_of_tied(config: RunConfig, shape: ModelShape) -> None:
    """Raise ConfigError for pipeline layouts that Megatron does not support in tied models."""
    tied = f"{config.model.path} has tied embeddings (tie_word_embeddings = true)"
    if config.parallel.vpp > 1:
        raise ConfigError(
            f"{config.source}: parallel.vpp = {config.parallel.vpp}, but {tied}, and Megatron-Bridge cannot load such "
            "a model in interleaved stages. Set parallel.vpp = 1."
        )
    if shape.delta and config.parallel.pp > 1:
        raise ConfigError(
            f"{config.source}: parallel.pp = {config.parallel.pp}, but {tied} and DeltaNet layers, and Megatron-core "
            "cannot save the checkpoint of such a model in stages. Set parallel.pp = 1."
        )


def _check_dense(config: RunConfig) -> None:
    """Raise ConfigError for an MoE setting with a dense model."""
    fields = Experts.model_fields.items()
    changed = {
        f"experts.{name}": getattr(config.experts, name)
        for name, field in fields
        if getattr(config.experts, name) != field.default
    }
    if config.parallel.etp:
        changed["parallel.etp"] = config.parallel.etp
    if isinstance(config, RlConfig) and config.algorithm.router_replay != "off":
        changed["algorithm.router_replay"] = config.algorithm.router_replay
    if changed:
        settings = " and ".join(f"{name} = {value!r}" for name, value in changed.items())
        raise ConfigError(
            f"{config.source}: {settings}: {config.model.path} has no experts. Remove this from the configuration."
        )


def _check_fp8(config: RunConfig, layers: int) -> None:
    """Raise ConfigError for FP8 products with a model that has DeltaNet ``layers``."""
    refused = [("model.fp8", config.model.fp8, "off", "which nobody has trained in FP8")]
    if isinstance(config, RlConfig):
        why = "whose weights verl does not quantize for the engines"
        refused.append(("rollout.precision", config.rollout.precision, "model", why))
    for name, value, accepted, why in refused:
        if value != accepted:
            raise ConfigError(
                f'{config.source}: {name} = "{value}", but {config.model.path} has {layers} DeltaNet layers, {why}. '
                f'Set {name} = "{accepted}".'
            )


def _check_old_log_prob(config: RlConfig) -> None:
    a = config.algorithm
    if a.old_log_prob == "rollout" and a.importance_sampling == "off":
        raise ConfigError(
            f'{config.source}: algorithm.old_log_prob = "rollout" needs importance weights for {config.model.path}: '
            "for some tokens its engine and actor choose different experts. Set algorithm.importance_sampling = "
            '"token", or old_log_prob = "actor".'
        )


def check_recompute(config: RunConfig, shape: ModelShape) -> None:
    """Raise ConfigError if the longest sequence does not fit even with all layers recomputed."""
    if config.memory.recompute != "auto":
        return
    assert isinstance(config, SftConfig | RlConfig), "a run is either SFT or RL"
    usual_tokens, longest_tokens = config.train.micro_batch_tokens, config.max_sequence_tokens
    layers = shape.layers // (config.parallel.pp * config.parallel.vpp)
    other_memory, input_share = token_memory(shape, fused_cross_entropy=config.memory.fused_cross_entropy)
    tokens = micro_batch_tokens(usual_tokens, longest_tokens, config.parallel.cp)
    needed = layers_to_recompute(tokens, usual_tokens, layers, other_memory=other_memory, input_share=input_share)
    if needed > layers:
        least = ceil(tokens * (1 - layers * (1 - input_share) / (layers + other_memory)))
        limit = "data.max_prompt_tokens + rollout.max_response_tokens"
        limit = "data.max_length_tokens" if isinstance(config, SftConfig) else limit
        raise ConfigError(
            f'{config.source}: memory.recompute = "auto" is not enough for {limit} = {longest_tokens}: with all '
            f"{layers} layers of a stage recomputed, {tokens} tokens on a rank need more memory than "
            f"train.micro_batch_tokens = {usual_tokens} without recomputation. Raise train.micro_batch_tokens to "
            f"{least}, or raise parallel.cp."
        )
