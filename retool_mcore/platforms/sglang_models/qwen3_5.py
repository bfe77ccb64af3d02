"""Qwen3.5's text models for SGLang: the layers of its vision models, with an output layer."""

from typing import Any

import torch
from sglang.srt.distributed import get_pp_group
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models import qwen3_5
from sglang.srt.server_args import get_global_server_args
from sglang.srt.utils import add_prefix


class Qwen3_5ForCausalLM(torch.nn.Module):
    """Loads weights as the vision model does, whose names it maps to those of text models."""

    layers_class: Any = qwen3_5.Qwen3_5ForCausalLM
    load_weights = qwen3_5.Qwen3_5ForConditionalGeneration.load_weights

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        # The norm and the state of linear attention have the configuration's dtype. SGLang builds
        # the model with the dtype of its arguments as torch's default.
        config.dtype = torch.get_default_dtype()
        config.encoder_only = False
        self.config, self.pp_group = config, get_pp_group()
        self.model = self.layers_class(config, quant_config, add_prefix("model", prefix))
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                use_attn_tp_group=get_global_server_args().enable_dp_lm_head,
                prefix=add_prefix("lm_head", prefix),
            )
        self.logits_processor = LogitsProcessor(config)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """The output for ``input_ids`` [T] at ``positions`` [T], the tokens of all requests."""
        hidden_TH = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden_TH, self.lm_head, forward_batch)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """The same with experts."""

    layers_class = qwen3_5.Qwen3_5MoeForCausalLM
    load_weights = qwen3_5.Qwen3_5MoeForConditionalGeneration.load_weights
    get_model_config_for_expert_location = (
        qwen3_5.Qwen3_5MoeForConditionalGeneration.get_model_config_for_expert_location
    )
    enable_shared_expert_fusion = False


EntryClass = [Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM]  # SGLang registers them by their names
