"""What does not fit together is refused before anything is started, in one clear error."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.normalizers import Replace

from retool_mcore.config import EvaluationConfig, RlConfig, load_config
from retool_mcore.data.files import write_parquet
from retool_mcore.data.rl import rl_row
from retool_mcore.data.rl_prompts import check_prompts
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.model.check import check_model
from retool_mcore.model.tensors import trained_tensors
from retool_mcore.platforms import get_platform
from retool_mcore.rollout.protocol import protocol_of
from retool_mcore.verl.keys.rollout import check_engine_args

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
CONFIGS = Path(__file__).parents[3] / "configs"
TINY, H200 = "rl_tiny_cpu", "rl_qwen2.5_7b_h200x8"
ASYNC = ("train.mode=async", "rollout.gpus=1", "cluster.gpus_per_node=2")
CACHE = ("rollout.kv_cache=fp8", "algorithm.importance_sampling=token")


def rl(name: str, *settings: str) -> RlConfig:
    return load_config(RlConfig, CONFIGS / f"{name}.toml", settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (TINY, ("train.mode=async",), 'train.mode = "async" and rollout.gpus = 0 are incompatible'),
        (TINY, ("rollout.gpus=1", "cluster.gpus_per_node=2"), '= "sync" and rollout.gpus = 1 are incompatible'),
        (TINY, (*ASYNC, "rollout.gpus=2"), "rollout.gpus = 2 leaves no GPU for training: [cluster] has 2 (1 nodes x"),
        (TINY, (*ASYNC, "parallel.tp=2"), "= 2 does not divide the 1 GPUs of [cluster] (1 nodes x 2 less 1 of rollo"),
        (TINY, (*ASYNC, "cluster.nodes=3"), "rollout.gpus = 1 is not a multiple of cluster.gpus_per_node = 2. With 3"),
        (TINY, ("train.mode=partial_rollout", "train.prefetch_batches=8.0"), "train.max_staleness = 7 steps before"),
        (TINY, ("algorithm.old_log_prob=rollout", "model.fp8=tensorwise"), 'Set algorithm.importance_sampling = "tok'),
        (TINY, CACHE, "rollout.kv_cache = 'fp8' needs GPU kernels"),
        (TINY, ('rollout.engine_args={attention_backnd="triton"}',), "Did you mean attention_backend"),
        (H200, ("rollout.precision=fp8",), 'algorithm.importance_sampling = "off" does not correct'),
        (H200, ("rollout.engine_args={quantization_param_path='s.json'}",), "quantization_param_path: rollout.kv_c"),
        (H200, ('rollout.engine_args={speculative_algorithm="EAGLE3"}',), 'speculative_algorithm = "EAGLE3", which'),
    ],
)
def test_what_does_not_go_together_is_one_clear_error(name: str, settings: tuple[str, ...], message: str):
    with pytest.raises(ConfigError) as caught:
        config = rl(name, *settings)
        get_platform(config.run.platform).check_settings(config)
        check_engine_args(config, get_platform(config.run.platform))
    assert message in str(caught.value)


def test_a_draft_model_is_refused_in_training_alone():
    """Nothing would ever give it weights there; `retool eval` reads them from disk."""
    run = rl(H200, 'rollout.engine_args={speculative_algorithm="NGRAM", speculative_num_draft_tokens=8}')
    check_engine_args(run, get_platform("cuda"))  # drafts of earlier text are allowed
    run.rollout.engine_args["speculative_algorithm"] = "EAGLE3"
    check_engine_args(EvaluationConfig.of(run), get_platform("cuda"))


def test_several_calls_a_turn_need_a_protocol_that_has_them(tokenizer):
    with pytest.raises(ConfigError, match="allows only one call per turn"):
        protocol_of(rl(TINY, "rollout.calls_per_turn=all", "rollout.protocol=retool").rollout, tokenizer)
    hermes = protocol_of(rl(TINY, "rollout.calls_per_turn=all").rollout, tokenizer)
    assert hermes.stop_token_ids == hermes.end_ids


def test_a_tokenizer_and_a_template_that_do_not_keep_turns_are_refused(tokenizer):
    made = deepcopy(tokenizer)
    made.backend_tokenizer.normalizer = Replace("a", "o")
    with pytest.raises(CheckpointError, match="does not reproduce what the chat template"):
        protocol_of(rl(TINY, "rollout.protocol=retool").rollout, made)
    made = deepcopy(tokenizer)
    made.chat_template = made.chat_template.replace("'\\n<tool_response>\\n' + message.content", "''")
    assert made.chat_template != tokenizer.chat_template
    with pytest.raises(CheckpointError, match="drops or changes tool messages"):
        protocol_of(rl(TINY).rollout, made)


@pytest.mark.parametrize("name", ["hermes", "retool"])
def test_a_prompt_over_the_budget_is_refused_as_its_protocol_renders_it(tokenizer, tmp_path: Path, name: str):
    rows = [rl_row(f"What is {index} + {index}?", str(2 * index), "s", "train", index) for index in range(10, 22)]
    write_parquet(tmp_path / "rows.parquet", rows)
    files = [f"data.train_file={tmp_path}/rows.parquet", f'validation.files=["{tmp_path}/rows.parquet"]']
    own = (*files, f"rollout.protocol={name}", "data.allow_overlap=true")
    render = protocol_of(rl(TINY, *own).rollout, tokenizer).prompt_ids
    tokens = len(render(rows[0]["prompt"]))  # each row has two digits, so all have as many
    check_prompts(rl(TINY, *own, f"data.max_prompt_tokens={tokens}"), render)
    with pytest.raises(DataError, match=f"{tokens} tokens .* over data.max_prompt_tokens = {tokens - 1}"):
        check_prompts(rl(TINY, *own, f"data.max_prompt_tokens={tokens - 1}"), render)


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
        check_model(rl(TINY, *settings))
    check_model(rl(TINY, *settings, "algorithm.importance_sampling=token", "algorithm.router_replay=R3"))
