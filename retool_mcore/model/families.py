"""The supported model families, and how training treats each field of their config.json.

Training applies a field, ignores it as harmless, or accepts only certain values. It rejects other
fields if they are set, because training would silently ignore them while transformers or SGLang
might apply them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retool_mcore.errors import ConfigError
from retool_mcore.model.files import is_hub_name
from retool_mcore.model.rope import check_engine_rope, rope_of_config
from retool_mcore.model.shape import DELTA, FULL, HYBRID, LINEAR

APPLIED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "attention_dropout",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
}  # fmt: skip
WINDOW = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}  # check_window
EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}
HYBRIDS = {*DELTA, "full_attention_interval", "partial_rotary_factor"}  # Qwen3.5
VISION = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # model_type -> that of its text part
HARMLESS = {  # about the file, generation, or how a program runs the model
    "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "transformers_version", "torch_dtype",
    "dtype", "use_cache", "initializer_range", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix", "task_specific_params",
    "problem_type", "id2label", "label2id", "num_labels", "return_dict", "output_attentions", "torchscript",
    "output_hidden_states", "is_decoder", "finetuning_task", "pruned_heads", "chunk_size_feed_forward",
    "transformers.js_config", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "unsloth_version",
    "unsloth_fixed", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "output_router_logits", "router_aux_loss_coef", "classifier_dropout", "is_llama_config", "seq_length",
    "model_max_length", "max_sequence_length", "use_flash_attn", "_flash_attn_2_enabled", "model_name",
    "use_bfloat16",
}  # fmt: skip
NO_SCALE = "training does not apply this factor"
NO_BIAS = "training has no such bias and would drop it"
HALVES = "training supports only NeoX-style (non-interleaved) RoPE"
ALL_EXPERTS = "training expects experts in every layer"


@dataclass(frozen=True, kw_only=True)
class Only:
    """The accepted values of a field, and the reason to reject others."""

    values: tuple[Any, ...]
    why: str


ONLY = {
    "hidden_act": Only(values=("silu", "swish"), why="training computes SiLU"),
    "hidden_dropout": Only(values=(0,), why="transformers has none in this family"),
    "attention_bias": Only(values=(False,), why=NO_BIAS),
    "mlp_bias": Only(values=(False,), why=NO_BIAS),
    "partial_rotary_factor": Only(values=(1,), why="training supports partial rotary embeddings only in Qwen3.5"),
    **{
        name: Only(values=(1,), why=NO_SCALE)
        for name in (
            "logits_scaling", "logit_scale", "residual_multiplier", "embedding_multiplier", "attention_multiplier",
            "scale_emb", "scale_depth",
        )
    },
    "quantization_config": Only(values=(), why="training does not read packed weights"),
    "auto_map": Only(values=(), why="training does not run a model's own code"),
    "qk_norm": Only(values=(False,), why="training normalizes queries and keys only in Qwen3"),
    "use_qk_norm": Only(values=(False,), why="training normalizes queries and keys only in Qwen3"),
    "is_encoder_decoder": Only(values=(False,), why="training supports decoders only"),
    "add_cross_attention": Only(values=(False,), why="training supports decoders only"),
    "cross_attention_hidden_size": Only(values=(), why="training supports decoders only"),
    "tie_encoder_decoder": Only(values=(False,), why="training supports decoders only"),
    "rope_interleaved": Only(values=(False,), why=HALVES),
    "rope_is_neox_style": Only(values=(True,), why=HALVES),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model_type.

    ``needs``: required fields, whose defaults are in transformers' code and not in files. ``also``:
    additional fields that are applied or harmless in this family.
    """

    models: str
    architecture: str
    needs: tuple[str, ...]
    also: frozenset[str] = frozenset()
    only: Mapping[str, Only] = field(default_factory=dict[str, Only])


HYBRID_NEEDS = ("num_hidden_layers", "num_key_value_heads", "head_dim", "layer_types")
EXPERTS_ONLY = {
    "norm_topk_prob": Only(values=(True,), why="training normalizes a token's expert weights to a sum of 1"),
    "mlp_only_layers": Only(values=([],), why=ALL_EXPERTS),
    "decoder_sparse_step": Only(values=(1,), why=ALL_EXPERTS),
}
HYBRID_ONLY = {
    **EXPERTS_ONLY,
    "attn_output_gate": Only(values=(True,), why="training always applies this gate"),
    "mamba_ssm_dtype": Only(values=("float32",), why="training keeps the states of DeltaNet layers in float32"),
    "mtp_num_hidden_layers": Only(values=(0,), why="an export would lack the layers that predict several tokens"),
}
FAMILIES = {
    "qwen2": Family(
        models="Qwen2, Qwen2.5 and models derived from them",
        architecture="Qwen2ForCausalLM",
        needs=("num_key_value_heads",),
        also=frozenset({"attention_bias"}),  # the family always has this bias, and transformers ignores the field
    ),
    "qwen3": Family(models="Qwen3", architecture="Qwen3ForCausalLM", needs=("num_key_value_heads", "head_dim")),
    "qwen3_moe": Family(
        models="Qwen3 with experts",
        architecture="Qwen3MoeForCausalLM",
        needs=("num_key_value_heads", "num_experts or num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
        also=frozenset(EXPERTS),
        only=EXPERTS_ONLY,
    ),
    "qwen3_5_text": Family(
        models="Qwen3.5, text part",
        architecture="Qwen3_5ForCausalLM",
        needs=(*HYBRID_NEEDS, *DELTA),
        also=frozenset(HYBRIDS),
        only=HYBRID_ONLY,
    ),
    "qwen3_5_moe_text": Family(
        models="Qwen3.5 with experts, text part",
        architecture="Qwen3_5MoeForCausalLM",
        needs=(
            *HYBRID_NEEDS,
            *DELTA,
            "num_experts or num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        also=frozenset(HYBRIDS | EXPERTS | {"shared_expert_intermediate_size"}),
        only=HYBRID_ONLY,
    ),
    "llama": Family(models="Llama 2 and 3, SmolLM2", architecture="LlamaForCausalLM", needs=()),
    "mistral": Family(models="Mistral 7B", architecture="MistralForCausalLM", needs=("num_key_value_heads",)),
}
DEFAULT_WINDOW = 4096  # transformers' default if the file has no sliding_window
WAYS_OUT = "Use a model without it. If the weights do not depend on it, remove the field from a copy of its config.json"


def check_fields(values: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError unless training supports each field of ``model``'s config.json."""
    kind = values.get("model_type")
    if kind in VISION:
        name = Path(model).name
        download = f"`hf download {model} --local-dir {name}`, then " if is_hub_name(model) else ""
        raise ConfigError(
            f"{model} is a vision model (model_type {kind}), and training takes a folder of its text part. Write one: "
            f"{download}`retool data model {name if download else model} {name}-text`."
        )
    family = FAMILIES.get(str(kind))
    if family is None:
        known = "; ".join(f"{name} ({supported.models})" for name, supported in FAMILIES.items())
        raise ConfigError(f"model_type of {model} is {kind!r}. Use a model of a supported type: {known}.")
    if values.get("architectures") != [family.architecture]:
        raise ConfigError(
            f"architectures of {model} is {values.get('architectures')}, but training {kind} needs "
            f"{[family.architecture]}. Use a model for text."
        )
    missing = [names for names in family.needs if not values.keys() & set(names.split(" or "))]
    if missing:
        raise ConfigError(
            f"config.json of {model} lacks {', '.join(missing)}. Only transformers knows the default for {kind}. "
            "Add the value to the file."
        )
    if str(kind).startswith("qwen") and values.get("head_dim", 1) is None:
        raise ConfigError(f"head_dim of {model} is null, which transformers cannot load. Remove the line.")
    if kind in HYBRID:
        _check_layer_types(values, model)
    try:
        rope_of_config(values)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}. Use a model with other RoPE settings.") from error
    for name, value in values.items():
        _check_field(name, value, family, model)


def _check_layer_types(values: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError unless every nth layer has full attention, as Megatron-Bridge assumes."""
    types: list[str] = values["layer_types"] or []
    layers: int = values["num_hidden_layers"]
    if len(types) != layers:
        raise ConfigError(
            f"layer_types of {model} has {len(types)} entries, but num_hidden_layers is {layers}. Correct the list in "
            "config.json."
        )
    full = [count for count, kind in enumerate(types, 1) if kind != LINEAR]
    interval = values.get("full_attention_interval") or (full or [1])[0]
    if full != list(range(interval, layers + 1, interval)):
        raise ConfigError(
            f"{model} has full attention in layers {full} of {len(types)} (layer_types), but training supports only "
            f"every nth layer, and here n would be {interval}. Use a model with a regular pattern."
        )


def _check_field(name: str, value: Any, family: Family, model: str) -> None:
    if value is None or name in APPLIED | WINDOW | HARMLESS | family.also:
        return
    only = family.only.get(name) or ONLY.get(name)
    if only is None:
        if value:  # a field that is off has no effect
            raise ConfigError(f"{name} of {model} is {value!r}, but training does not know this field. {WAYS_OUT}.")
    elif value not in only.values:
        accepted = " or ".join(repr(accepted_value) for accepted_value in only.values) or "no value"
        raise ConfigError(f"{name} of {model} is {value!r}, but training accepts {accepted}: {only.why}. {WAYS_OUT}.")


def check_engine_fields(values: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError for a field that training applies but SGLang does not."""
    try:
        check_engine_rope(values)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}. SFT supports it. For RL, use a model with that factor.") from error


def window_of(values: Mapping[str, Any]) -> int | None:
    """The sliding window in tokens, if some layer has one; None for full attention."""
    kinds = set(values.get("layer_types") or ()) - {FULL, *((LINEAR,) if values.get("model_type") in HYBRID else ())}
    if other := kinds - {"sliding_attention"}:
        raise ConfigError(f"layer_types has {', '.join(sorted(other))}, but training computes full attention")
    width: int | None = values.get("sliding_window", DEFAULT_WINDOW)
    if values.get("model_type") == "mistral":
        return width
    if values.get("model_type") == "llama":  # transformers ignores it for llama, but other programs may not
        return values.get("sliding_window") if values.get("use_sliding_window", True) else None
    return width if kinds or values.get("use_sliding_window") else None


def check_window(values: Mapping[str, Any], longest_tokens: int, model: str) -> None:
    """Raise ConfigError if sequences of ``longest_tokens`` exceed a layer's sliding window.

    Training always uses full attention, which is equivalent for sequences within the window.
    """
    try:
        window = window_of(values)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}. Use another model.") from error
    if window is not None and longest_tokens > window:
        raise ConfigError(
            f"sliding_window of {model} is {window}, but training uses full attention, which is equivalent only up to "
            f"{window} tokens. The run's sequences have up to {longest_tokens}. Shorten them, or use a model without "
            "a sliding window."
        )
