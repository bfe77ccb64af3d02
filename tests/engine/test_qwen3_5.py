"""SGLang serves Qwen3.5's text models as transformers computes them, on the CPU."""

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed")
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.cpu.patches import _pickled  # pyright: ignore[reportPrivateUsage]  as runs send them
from retool_mcore.platforms.patches_verl import FORMAT, flattened
from retool_mcore.platforms.weight_sums import ACTION, checksum, sums_of
from retool_mcore.rollout.server import SglangServer
from retool_mcore.verl.weight_check import different_layers, layer_of
from tests.sglang_client import access

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
VOCAB = 320
PROMPTS = [[random.Random(i).randrange(VOCAB) for _ in range(length)] for i, length in enumerate((1, 3, 9, 70, 131))]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # with 0.2, transformers in float32 is up to 1.2e-4 from float64
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make_model(kind: str, seed: int) -> Any:
    """A random model of transformers: "dense" with tied embeddings, or "moe"."""
    import transformers

    name = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe"}[kind]
    more = {"tie_word_embeddings": True} if kind == "dense" else {**EXPERTS, "shared_expert_intermediate_size": 64}
    shape = {each: value for each, value in SHAPE.items() if kind == "dense" or each != "intermediate_size"}
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}TextConfig")(**shape, **more))
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if "norm" in each or "dt_bias" in each:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model.float().eval()


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The kind of the model and a server of its seed 0."""
    get_platform("cpu").activate()
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, seed=0).save_pretrained(folder)
    with SglangServer(
        folder,
        get_platform("cpu"),
        dtype="float32",
        log_path=folder / "log",
        max_running_requests=16,
        extra_args=["--skip-tokenizer-init"],
    ) as server:
        yield request.param, server


def post(server: Any, path: str, **body: Any) -> Any:
    with httpx.Client(**access(server)) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check(model: Any, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    """The log-probs of prompts, where SGLang computed them, and of greedy tokens agree to 1e-4."""
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt + answer["output_ids"]
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert want[len(prompt) - 1 :].argmax(-1).tolist() == answer["output_ids"]
        meta = answer["meta_info"]
        got = [each[0] for each in (*meta.get("input_token_logprobs", ())[1:], *meta["output_token_logprobs"])]
        chosen = want.gather(1, torch.tensor(ids[1:])[:, None])[-len(got) :, 0]
        torch.testing.assert_close(torch.tensor(got), chosen, atol=1e-4, rtol=0)


def test_prompts_and_sampled_tokens_have_the_log_probabilities_of_transformers(served: tuple[str, Any]):
    kind, server = served
    answers = post(
        server, "/generate", input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )
    assert [len(answer["meta_info"]["input_token_logprobs"]) for answer in answers] == [len(each) for each in PROMPTS]
    check(make_model(kind, seed=0), PROMPTS, answers)


def test_a_second_turn_continues_from_the_cached_states(served: tuple[str, Any]):
    kind, server = served
    first = post(server, "/generate", input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    turns = [[*prompt, *answer["output_ids"], 7, 8, 9] for prompt, answer in zip(PROMPTS, first, strict=True)]
    second = post(server, "/generate", input_ids=turns, sampling_params=GREEDY, return_logprob=True)
    cached = [answer["meta_info"]["cached_tokens"] for answer in second]
    assert cached == [len(turn) - 4 for turn in turns], "all but the last sampled token and the tool's"
    check(make_model(kind, seed=0), turns, second)


def test_new_weights_arrive_as_verl_sends_them(served: tuple[str, Any]):
    kind, server = served

    def send(model: Any) -> None:
        bucket = base64.b64encode(_pickled(flattened(list(model.state_dict().items())))).decode()
        body = {"serialized_named_tensors": [bucket], "load_format": FORMAT, "flush_cache": True}
        assert post(server, "/update_weights_from_tensor", **body)["success"]

    other = make_model(kind, seed=1)
    try:
        send(other)
        answers = post(server, "/generate", input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
        check(other, PROMPTS, answers)
        sent = other.named_parameters()
        sums = sums_of((name, str(each.dtype), each.numel(), checksum(each)) for name, each in sent)
        held = [rank["sums"] for rank in post(server, "/weights_checker", action=ACTION)["ranks"]]
        assert different_layers(sums, held) == []
        wrong = {name: (dtype, size, bits + 1) for name, (dtype, size, bits) in sums.items()}
        assert set(different_layers(wrong, held)) == {layer_of(name) for name in sums}, "it skips no layer"
    finally:
        send(make_model(kind, seed=0))
