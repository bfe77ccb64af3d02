"""PPO's loss in real updates: verl's Megatron worker, its engine and its losses.

The loss that a worker reports of each update is compared with the paper's formula, on the
log-probabilities of the update's own pass.
"""

from typing import Any

import pytest
import torch

from tests.parity.megatron_ranks import launch, make_model
from tests.parity.rl_ranks import LENGTHS, PROMPT_TOKENS, row

DUAL = "algorithm.clip=[0.2, 0.28, 3]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rl_losses")
    common = {"model": str(make_model(folder / "model")), "role": "actor", "auto": False, "micro_batch_tokens": 128}
    masked = {"name": "masked", "settings": [DUAL], "lr": 1e-3, "actions": [["update", 0]]}
    settings = [DUAL, "algorithm.old_log_prob=rollout", "train.mini_batch_prompts=3"]
    engines = {"name": "engines", "settings": settings, "lr": 2e-2, "actions": [["update", None, 4]]}
    jobs = [{**common, **job} for job in (masked, engines)]
    return {name: answers[0] for name, answers in launch(jobs, 1, folder / "ranks").items()}


def losses(outputs: list[list[float]]) -> list[float]:
    """PPO's loss of four updates of four rows, by the worker's log-probabilities [rows, T]."""
    rows = [row(100 * batch + number, length) for batch in (0, 1) for number, length in enumerate(LENGTHS[batch])]
    sums, counts = [], []
    for of_row, columns in zip(outputs, rows, strict=True):
        old_T, advantage_T = torch.tensor(columns["old_log_probs"]), torch.tensor(columns["advantages"])
        mask_T = torch.tensor(columns["response_mask"])
        ratio_T = (torch.tensor(of_row[PROMPT_TOKENS - 1 : -1]) - old_T).exp()
        sums.append(float((clipped(ratio_T, advantage_T) * mask_T).sum()))
        counts.append(int(mask_T.sum()))
    return [-sum(sums[at : at + 4]) / sum(counts[at : at + 4]) for at in range(0, 16, 4)]


def clipped(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's term, with the dual clip at 3 (arXiv 1912.09729, Eq. 5)."""
    term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return torch.where(advantage < 0, torch.maximum(term, 3 * advantage), term)


def test_each_of_four_updates_clips_the_ratio_to_the_engine(runs: dict[str, dict[str, Any]]):
    """old_log_prob = "rollout" without weights: each by the log-probabilities of its own pass."""
    run = runs["engines"]
    assert run["loss"] == pytest.approx(losses(run["during"]), rel=1e-4, abs=1e-5)
    assert abs(run["loss"][-1] - losses(run["before"])[-1]) > 1e-3, "the weights have moved by then"


def test_an_update_without_a_token_to_learn_from_changes_nothing(runs: dict[str, dict[str, Any]]):
    run = runs["masked"]
    assert run["loss"][0] == 0 and run["grad_norm"][0] == 0
    assert run["grad_norm"][1] > 1e-3, "the next update learns"
    assert all(abs(value) < 1e3 for row_outputs in run["after"] for value in row_outputs)
