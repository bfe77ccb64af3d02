"""What does not fit together is refused before anything is started, in one clear error."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.files import write_parquet
from retool_mcore.data.rl import rl_row
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.data.task_model import CHAT_TEMPLATE
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.model.check import check_model
from retool_mcore.model.tensors import trained_tensors
from retool_mcore.rollout.protocol import protocol_of

RL = Path(__file__).parents[3] / "configs/rl_tiny_cpu.toml"
TOOL_MESSAGE = "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}"


def rollout_of(*settings: str):
    return load_config(RlConfig, RL, settings).rollout


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary of whole words: nothing in it spells out a tag."""
    words = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[UNK]"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens(words[:4])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="[UNK]")
    made.chat_template = CHAT_TEMPLATE
    return made


def test_several_calls_a_turn_need_a_protocol_that_has_them(tokenizer):
    both = ("rollout.calls_per_turn=all", "rollout.protocol=retool")
    with pytest.raises(ConfigError, match="allows only one call per turn"):
        protocol_of(rollout_of(*both), tokenizer)
    hermes = protocol_of(rollout_of("rollout.calls_per_turn=all"), tokenizer)
    assert hermes.stop_token_ids == hermes.end_ids


def test_a_tokenizer_that_does_not_spell_out_the_papers_tag_is_refused():
    with pytest.raises(CheckpointError, match="does not reproduce what the chat template"):
        protocol_of(rollout_of("rollout.protocol=retool"), word_tokenizer())


def test_a_template_that_drops_tool_messages_is_refused(tokenizer):
    made = deepcopy(tokenizer)
    assert made.chat_template.count(TOOL_MESSAGE) == 1
    made.chat_template = made.chat_template.replace(TOOL_MESSAGE, "")
    with pytest.raises(CheckpointError, match="drops or changes tool messages"):
        protocol_of(rollout_of(), made)


@pytest.mark.parametrize("name", ["hermes", "retool"])
def test_a_prompt_over_the_budget_is_refused_as_its_protocol_renders_it(tokenizer, tmp_path, name):
    rows = [rl_row(f"What is {index} + {index}?", str(2 * index), "s", "train", index) for index in range(10, 30)]
    for split in ("train", "val"):
        write_parquet(tmp_path / f"{split}.parquet", rows)
    files = [f"data.train_file={tmp_path}/train.parquet", f'validation.files=["{tmp_path}/val.parquet"]']

    def config_of(limit: int) -> RlConfig:
        own = (f"data.max_prompt_tokens={limit}", f"rollout.protocol={name}", "data.allow_overlap=true")
        return load_config(RlConfig, RL, [*files, *own])

    render = protocol_of(config_of(1).rollout, tokenizer).prompt_ids
    tokens = len(render(rows[0]["prompt"]))  # each row has two digits, so all have as many
    check_prompts(config_of(tokens), render)
    with pytest.raises(DataError, match=f"{tokens} tokens .* over data.max_prompt_tokens = {tokens - 1}"):
        check_prompts(config_of(tokens - 1), render)


def test_the_engines_log_probs_with_fp8_need_importance_sampling():
    message = r'algorithm\.old_log_prob.*Set algorithm\.importance_sampling = "token"'
    with pytest.raises(ConfigError, match=message):
        load_config(RlConfig, RL, ["algorithm.old_log_prob=rollout", "model.fp8=tensorwise"])


def test_the_engines_log_probs_with_experts_need_importance_sampling(tmp_path: Path):
    from safetensors.numpy import save_file

    values: dict[str, Any] = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 8, "num_experts": 4, "vocab_size": 16,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 4, "head_dim": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {name: np.ones(shape, np.float32) for name, shape in trained_tensors(values).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = [f"model.path={tmp_path}", "algorithm.old_log_prob=rollout"]
    with pytest.raises(ConfigError, match=r'different experts\. Set algorithm\.importance_sampling = "token"'):
        check_model(load_config(RlConfig, RL, settings))
    check_model(load_config(RlConfig, RL, [*settings, "algorithm.importance_sampling=token"]))
    replay = "algorithm.router_replay=R3"
    check_model(load_config(RlConfig, RL, [*settings, "algorithm.importance_sampling=token", replay]))
