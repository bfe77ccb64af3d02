"""Patches of mbridge: RoPE scaling, unknown tensors, tied embeddings and the export of experts.

Megatron-core 0.16.1 supports two types of RoPE scaling, both incompletely. llama3 has hard-coded
factors 1, 4 and 8192. yarn ignores attention_factor, and the fused kernel for packed sequences
drops yarn's own factor. So we replace Megatron's frequencies by those that transformers computes,
and put yarn's factor into softmax_scale, which every kernel applies.

mbridge exports experts with one gather per expert. Here the experts of a layer are stacked and
gathered together: with 128 experts on 2 ranks, linear_fc1.weight0 to weight63 take one gather.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.model.families import FAMILIES
from retool_mcore.model.rope import rope_of_config
from retool_mcore.model.tensors import EMBEDDING, check_tensors
from retool_mcore.platforms.patches import Change, Patch, requirement

Weights = Iterator[tuple[str, torch.Tensor]]
_EXPERT = re.compile(r"(.+\.mlp\.experts\.linear_fc[12])\.weight\d+")


def _apply_rope_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Megatron's rotary frequencies by those of the model's Hugging Face config."""

    @wraps(original)
    def _model_provider(self: Any, *args: Any, **kwargs: Any) -> Any:
        build = original(self, *args, **kwargs)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = rope_of_config(self.hf_config.to_dict()).kind
        if kind == "default":
            return build
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](self.hf_config, torch.device("cpu"))
        if factor != 1:  # the factor scales query and key, so their product has its square
            self.config.softmax_scale = factor**2 * self.config.kv_channels**-0.5

        @wraps(build)
        def provider(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            rotary = model.rotary_pos_emb
            rotary.inv_freq = frequencies.to(rotary.inv_freq)
            rotary.seq_len_interpolation_factor = None  # mbridge's Llama bridge sets it for any type of scaling
            return model

        return provider

    return _model_provider


def _map_tied_output(original: Callable[..., None]) -> Callable[..., None]:
    """Load the embedding as the output layer of a tied model's last pipeline stage."""

    @wraps(original)
    def _adjust_mapping_for_shared_weights(self: Any) -> None:
        original(self)
        if getattr(self.hf_config, "tie_word_embeddings", False):
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": EMBEDDING}

    return _adjust_mapping_for_shared_weights


def _check_and_load_weights(original: Callable[..., None]) -> Callable[..., None]:
    """Refuse a checkpoint with tensors that the model does not have, and load tied critics.

    A critic's output layer is its value head, which a language model's checkpoint lacks. mbridge
    does not load a value head, but it reads the language model's head first, which fails for a tied
    model.
    """

    @wraps(original)
    def load_weights(self: Any, models: Any, weights_path: str, *args: Any, **kwargs: Any) -> None:
        config = Path(self._get_actual_hf_path(weights_path), "config.json")
        values = json.loads(config.read_text(encoding="utf-8"))
        if values.get("model_type") in FAMILIES:
            check_tensors(self._get_safetensor_io(weights_path).load_hf_weight_names(), values, weights_path)
        critic = not getattr(self.hf_config, "tie_word_embeddings", False)  # verl unties the critic's config
        if not (critic and values.get("tie_word_embeddings", False)):
            return original(self, models, weights_path, *args, **kwargs)
        all_weights = self._weight_name_mapping_mcore_local_to_global
        self._weight_name_mapping_mcore_local_to_global = lambda model: {
            local: name for local, name in all_weights(model).items() if name != "output_layer.weight"
        }
        try:
            return original(self, models, weights_path, *args, **kwargs)
        finally:
            del self._weight_name_mapping_mcore_local_to_global

    return load_weights


@dataclass(frozen=True)
class _Experts:
    """One matrix, such as linear_fc1, of all experts of a layer on this rank."""

    prefix: str  # decoder.layers.3.mlp.experts.linear_fc1
    count: int


class _WithoutExperts:
    """A view of a model chunk without experts, for mbridge's own export."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def named_parameters(self) -> Weights:
        return ((name, weight) for name, weight in self._chunk.named_parameters() if _prefix(name) is None)


def _prefix(name: str) -> str | None:
    match = _EXPERT.fullmatch(name)
    return match and match[1]


def _gather_experts_by_layer(original: Callable[..., Weights]) -> Callable[..., Weights]:
    """Replace mbridge's export, with the same names, values and order, for expert parallelism."""

    @wraps(original)
    def export_weights(self: Any, models: Sequence[torch.nn.Module]) -> Weights:
        if self.mpu.ep_size == 1 or self.mpu.pp_size > 1:
            return original(self, models)
        return export(self, models)

    def export(bridge: Any, models: Sequence[torch.nn.Module]) -> Weights:
        from mbridge.core.util import unwrap_model

        [chunk] = [unwrap_model(model) for model in models]
        after = _experts_by_preceding_weight(bridge, chunk)
        experts = ((name, weight) for name, weight in chunk.named_parameters() if _prefix(name) is not None)
        for name, weight in original(bridge, [_WithoutExperts(chunk)]):
            yield name, weight
            for matrices in after.pop(name, ()):
                mine = [expert.detach() for _, expert in islice(experts, matrices.count)]
                yield from _gathered(bridge, matrices, mine)
        assert not after, f"experts were not exported, because these weights were not: {sorted(after)}"

    return export_weights


def _experts_by_preceding_weight(bridge: Any, chunk: Any) -> dict[str, list[_Experts]]:
    """Exported name of a weight -> the expert matrices that follow it in the model."""
    whole_names = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
    last, after = "", defaultdict[str, list[_Experts]](list)
    for prefix, run in groupby((name for name, _ in chunk.named_parameters()), _prefix):
        names = list(run)
        if prefix is None:
            last = bridge._weight_name_mapping_mcore_to_hf(whole_names[names[-1]])[-1]
        else:
            after[last].append(_Experts(whole_names[names[0]].rpartition(".")[0], len(names)))
    return after


def _gathered(bridge: Any, experts: _Experts, mine: list[torch.Tensor]) -> Weights:
    """Gather this rank's matrices ``mine`` over the ETP and EP groups. Collective."""
    mpu, like = bridge.mpu, mine[0]
    gathered = torch.stack(mine)[None]  # [ETP rank, expert of this rank, *shape]
    mine.clear()
    if mpu.etp_size > 1:
        gathered = _gather(gathered[0], mpu.etp_size, mpu.etp_group)
    gathered = _gather(gathered, mpu.ep_size, mpu.ep_group)
    for local in range(experts.count):
        for rank, parts in enumerate(gathered[:, :, local].unbind()):
            name = f"{experts.prefix}.weight{rank * experts.count + local}"
            matrix = bridge._weight_merge_across_tp(name, list(parts.unbind()), like)
            yield from zip(*bridge._weight_to_hf_format(name, matrix), strict=True)


def _gather(mine: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    whole = mine.new_empty((size, *mine.shape))
    dist.all_gather_into_tensor(whole.view(-1), mine.view(-1), group=group)
    return whole


MODEL_PATCHES = (
    Patch(
        changes=(
            Change(
                "mbridge.core.llm_bridge.LLMBridge._model_provider",
                ("self", "post_model_creation_callbacks"),
                _apply_rope_scaling,
            ),
        ),
        reason="mbridge passes rope_theta to Megatron and drops every RoPE scaling",
        gain="Wrong result without it: with yarn, linear or llama3, training and engine rotate by different angles",
        applies_to=requirement("mbridge"),
        remove_when="mbridge and Megatron-core apply a configuration's rope_parameters, attention_factor included",
    ),
    Patch(
        changes=(
            Change(
                "mbridge.core.bridge.Bridge.load_weights",
                ("self", "models", "weights_path", "memory_efficient"),
                _check_and_load_weights,
            ),
        ),
        reason="mbridge silently skips tensors that it does not know, such as biases",
        gain="Wrong result without it: training starts from a model that differs from the checkpoint",
        applies_to=requirement("mbridge"),
        remove_when="mbridge refuses a checkpoint with tensors that it does not map",
    ),
    Patch(
        changes=(
            Change("mbridge.models.llama.LLaMABridge._adjust_mapping_for_shared_weights", ("self",), _map_tied_output),
        ),
        reason="a Llama with tied embeddings, such as Llama-3.2 and SmolLM2, does not load into pipeline stages",
        gain="parallel.pp > 1 works for these models; without it the run fails at its start",
        applies_to=requirement("mbridge"),
        remove_when="mbridge's bridge of Llama maps tied embeddings, as that of Qwen2 does",
    ),
)
EXPERT_EXPORT_PATCH = Patch(
    changes=(Change("mbridge.core.bridge.Bridge.export_weights", ("self", "models"), _gather_experts_by_layer),),
    reason="with expert parallelism each weight sync runs one gather per matrix of each expert",
    gain="Weight sync of an eighth of Qwen3-30B-A3B's layers: 0.47 s with this patch and verl's sgl_update_weights "
    "patch (two H100), 1.9 s with neither (two H200, in a step of 22 s); 15 to 26 us of host time per matrix instead "
    "of 125 to 186",
    applies_to=requirement("mbridge"),
    remove_when="mbridge gathers the experts of a layer together",
)
MBRIDGE_PATCHES = (*MODEL_PATCHES, EXPERT_EXPORT_PATCH)
