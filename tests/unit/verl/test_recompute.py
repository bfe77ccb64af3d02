"""memory.recompute = "auto": the number of layers, and the token budget of a batch."""

import pytest

from retool_mcore.config import Memory, RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.model.check import check_recompute
from retool_mcore.model.shape import PUBLISHED, layers_to_recompute, token_memory
from retool_mcore.platforms.patches_verl import MIN_MICRO_BATCHES
from retool_mcore.verl.recompute import set_budget

QWEN_7B = PUBLISHED["Qwen2.5-7B"]


def test_a_7b_model_recomputes_only_what_a_long_sequence_needs():
    other_memory, input_share = token_memory(QWEN_7B, fused_cross_entropy=True)
    found = {
        tokens: layers_to_recompute(tokens, 11264, 28, other_memory=other_memory, input_share=input_share)
        for tokens in (8192, 11264, 12158, 16384)
    }
    assert found == {8192: 0, 11264: 0, 12158: 3, 16384: 11}


def test_of_an_rl_run_the_longest_response_counts():
    def check(tokens: int, recompute: str = "auto") -> None:
        layout = ("parallel.tp=1", "parallel.cp=1", "parallel.pp=1")
        settings = (*layout, f"train.micro_batch_tokens={tokens}", f"memory.recompute={recompute}")
        check_recompute(load_config(RlConfig, "configs/rl_qwen2.5_7b_h200x8.toml", settings), QWEN_7B)

    with pytest.raises(ConfigError, match=r"max_response_tokens = 18432 does not fit .* = 8192 tokens\. .* \"auto\""):
        check(8192, "full")
    check(8192)
    message = r"max_response_tokens = 18432: .* = 2048 without recomputation\. Raise train\.micro_batch_tokens to (\d+)"
    with pytest.raises(ConfigError, match=message) as error:
        check(2048)
    check(int(str(error.value).partition("Raise train.micro_batch_tokens to ")[2].partition(",")[0]))


@pytest.mark.parametrize(
    ("lengths", "cp", "budget", "least"),
    [
        ([[50, 40, 30], [20, 20, 20]], 1, 100, 2),  # 120 tokens are two micro-batches of the usual 100
        ([[150, 40, 30, 80], [20, 20, 20, 20]], 1, 150, 3),  # the longest fits, and there are not fewer
        ([[301, 40, 30, 80], [20, 20, 20, 20]], 2, 151, 3),
        ([[150, 140], [130, 120]], 1, 150, 2),  # no more than sequences
    ],
)
def test_the_budget_of_a_batch(lengths: list[list[int]], cp: int, budget: int, least: int, verl_on_cpu: None):
    from tensordict import TensorDict

    data = TensorDict({}, batch_size=[])
    set_budget(data, lengths, 100, cp)
    assert (data["max_token_len_per_gpu"], data[MIN_MICRO_BATCHES]) == (budget, least)


def test_only_auto_takes_workers_that_recompute(verl_on_cpu: None):
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from retool_mcore.verl.update_worker import RecomputingWorker, UpdateWorker
    from retool_mcore.verl.workers import worker_class

    for verls in (ActorRolloutRefWorker, DetachActorWorker):
        chosen = worker_class(verls, Memory(recompute="auto"))
        assert issubclass(chosen, verls)
        assert (chosen.actor_worker_cls, chosen.ref_worker_cls) == (RecomputingWorker, RecomputingWorker)
        assert worker_class(verls, Memory(recompute="full")).actor_worker_cls is UpdateWorker
    assert issubclass(worker_class(TrainingWorker, Memory(recompute="auto")), RecomputingWorker)
