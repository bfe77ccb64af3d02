"""SGLang's server on CPU samples from the models that the parity tests train.

Minutes: a server for each family. That Megatron computes what transformers does is in `make test`,
and that SGLang turns heads by the same angles is, too.
"""

from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
from retool_mcore.platforms import get_platform
from retool_mcore.rollout.server import SglangServer
from tests.model_parity import KINDS, Case, sequences
from tests.parity.megatron_ranks import make_model
from tests.sglang_client import access

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator"),
]
ROPES = {"qwen2": "yarn", "qwen3": "linear", "qwen3_moe": "yarn", "llama": "llama3", "mistral": "default"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_served_model_computes_what_transformers_does(kind: str, tmp_path: Path):
    model = make_model(tmp_path / "model", **Case(kind=kind, rope=ROPES[kind], tied=kind == "llama").settings())
    with SglangServer(
        model, get_platform("cpu"), dtype="float32", log_path=tmp_path / "log", max_running_requests=16
    ) as server:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": sequences(), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        with httpx.Client(**access(server)) as client:
            answers = client.post("/generate", json=body).json()
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, answer in zip(sequences(), answers, strict=True):
        with torch.no_grad():
            want = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        got = torch.tensor([each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]])
        torch.testing.assert_close(got, want.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4, rtol=0)
