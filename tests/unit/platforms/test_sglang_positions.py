"""SGLang rotates heads by the angles of training, or RL refuses the model."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
from retool_mcore.errors import ConfigError
from retool_mcore.model.rope import check_engine_rope
from retool_mcore.platforms import get_platform
from tests.model_parity import LONGEST, ROPES, SAMPLED, THETA

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
WIDTH = 16


@pytest.mark.parametrize("name", ROPES)
def test_sglang_rotates_as_training_does_or_rl_refuses_the_model(name: str, monkeypatch: pytest.MonkeyPatch):
    get_platform("cpu").activate()
    from sglang.srt import server_args
    from sglang.srt.layers.rotary_embedding import get_rope
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    here = server_args.ServerArgs(model_path="none", device="cpu")
    monkeypatch.setattr(server_args, "_global_server_args", here, raising=True)
    settings = ROPES[name] | {"rope_theta": THETA}
    values = {"rope_parameters": settings, "max_position_embeddings": LONGEST}
    theirs = get_rope(WIDTH, WIDTH, LONGEST, int(THETA), True, settings, torch.float32).cos_sin_cache[:LONGEST]
    config = LlamaConfig(**values, hidden_size=4 * WIDTH, num_attention_heads=4)
    trained = LlamaRotaryEmbedding(config)  # whose frequencies Megatron gets
    angles = torch.outer(torch.arange(LONGEST, dtype=torch.float32), trained.inv_freq)
    ours = torch.cat([angles.cos(), angles.sin()], dim=-1) * trained.attention_scaling
    assert torch.allclose(theirs, ours, atol=1e-5) == (name in SAMPLED)
    with nullcontext() if name in SAMPLED else pytest.raises(ConfigError, match="SGLang ignores these fields"):
        check_engine_rope(values)
