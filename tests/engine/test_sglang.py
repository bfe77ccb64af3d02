"""The real SGLang server agrees with transformers and, after each weight sync, with Megatron."""

import random
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from retool_mcore.platforms import get_platform
from retool_mcore.platforms.weight_sums import ACTION, checksum, sums_of
from retool_mcore.rollout.server import SglangServer
from retool_mcore.verl.weight_check import different_layers, layer_of
from tests.parity.megatron_ranks import launch, make_model
from tests.sglang_client import access

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
PROMPTS = [[random.Random(i).randrange(2, 258) for _ in range(4 + 5 * i)] for i in range(6)]
GREEDY = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch):
    """The processes that send weights derive the server's key from it."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")


def generate(server, **request) -> list[dict]:
    body = {"input_ids": PROMPTS, "sampling_params": GREEDY, "return_logprob": True} | request
    with httpx.Client(**access(server)) as client:
        reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_against_transformers(answers: list[dict], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor(answer["output_ids"])
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids.tolist()])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1)
        assert want.argmax(-1).tolist() == ids.tolist()
        got = torch.tensor([lp for lp, *_ in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(got, want.gather(1, ids[:, None])[:, 0], atol=5e-5, rtol=0)


def test_arguments_by_name_reach_the_server(server):
    with httpx.Client(**access(server)) as client:
        assert client.get("/server_info").raise_for_status().json()["random_seed"] == 41


def test_its_weights_have_the_sums_of_the_models_files(server, model_dir):
    """Fused matrices included. No layer is skipped, except the vocabulary, which SGLang pads."""
    weights = load_file(model_dir / "model.safetensors")
    files = sums_of((name, str(each.dtype), each.numel(), checksum(each)) for name, each in weights.items())

    def held(prefix: str) -> list[dict]:
        with httpx.Client(**access(server)) as client:
            reply = client.post("/weights_checker", json={"action": ACTION + prefix})
        assert reply.status_code == 200, reply.text
        return [rank["sums"] for rank in reply.json()["ranks"]]

    assert different_layers(files, held("")) == []
    wrong = {name: (dtype, size, bits + 1) for name, (dtype, size, bits) in files.items()}
    vocabulary = {"model.embed_tokens.weight", "lm_head.weight"}
    padded = vocabulary if weights["model.embed_tokens.weight"].shape[0] % 64 else set[str]()
    assert set(different_layers(wrong, held(""))) == {layer_of(name) for name in files} - padded
    of_layer = held("model.layers.1.")
    assert of_layer[0] and all(name.startswith("model.layers.1.") for name in of_layer[0])
    assert different_layers(wrong, of_layer) == ["model.layers.1."]


def test_a_seed_fixes_a_response_whatever_else_is_in_the_batch(server):
    drawn = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 16, "ignore_eos": True}

    def sampled(seeds: list[int | None]) -> list[list[int]]:
        """One response of the same prompt for each seed; None: a request without one."""
        params = [drawn if seed is None else {**drawn, "sampling_seed": seed} for seed in seeds]
        answers = generate(server, input_ids=PROMPTS[:1] * len(seeds), sampling_params=params)
        return [answer["output_ids"] for answer in answers]

    together = sampled([1, 2, None, 3, None])
    assert together[0] != together[1] != together[3] != together[0], "another seed is another response"
    assert together[2] != together[4], "requests without a seed are not of one"
    assert [sampled([3])[0], sampled([2, 1])[0], sampled([None, 1])[1]] == [together[3], together[1], together[0]]


def check_three_updates(server, model, layout: dict[str, int], tmp_path: Path) -> None:
    """Rollout and actor log-probabilities differ by at most 1e-4 (measured: 6e-6)."""
    before = [answer["output_ids"] for answer in generate(server)]
    actions = []
    for step in (1, 2, 3):
        actions += [["train", step, step], ["sync", server.port], ["rollout_gap", server.port, PROMPTS]]
    actions += [["export", str(tmp_path / "export")]]
    job = {"name": "updates", "model": str(model), "layout": layout, "actions": actions}
    answers = launch([job], 2, tmp_path / "ranks")["updates"]
    for gap in answers[2::3]:
        assert len(gap["sglang"]) == len(PROMPTS) * 24
        assert max(abs(a - b) for a, b in zip(gap["sglang"], gap["megatron"], strict=True)) <= 1e-4
    after = generate(server)
    assert [answer["output_ids"] for answer in after] != before
    check_against_transformers(after, tmp_path / "export")


def test_three_updates_from_two_megatron_ranks_arrive_exactly(server, model_dir, tmp_path):
    check_against_transformers(generate(server), model_dir)
    try:
        check_three_updates(server, model_dir, {"tp": 2}, tmp_path)
    finally:
        body = {"model_path": str(model_dir), "weight_version": "0", "flush_cache": True}
        with httpx.Client(**access(server)) as client:
            client.post("/update_weights_from_disk", json=body).raise_for_status()


@pytest.mark.long
def test_three_updates_of_experts_on_two_ranks_arrive_exactly(tmp_path):
    model, log = make_model(tmp_path / "model", "qwen3_moe"), tmp_path / "log"
    with SglangServer(model, get_platform("cpu"), dtype="float32", log_path=log, max_running_requests=16) as server:
        check_three_updates(server, model, {"ep": 2}, tmp_path)
