"""PPO's loss in real updates: verl's Megatron worker, its engine and its losses.

The loss that a worker reports of each update is compared with the paper's formula, on the
log-probabilities of the update's own pass.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from tests.parity.megatron_ranks import launch, make_model
from tests.parity.rl_ranks import LENGTHS, PROMPT_TOKENS, row

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")

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


class Batch:
    """The responses of one update or both, one tensor [T] of each, with the worker's outputs:
    ``outputs`` [rows, T].
    """

    def __init__(self, outputs: list[list[float]], updates: int = 1) -> None:
        columns = [
            row(100 * update + number, length)
            for update in range(updates)
            for number, length in enumerate(LENGTHS[update])
        ]
        self.ratio, self.advantage, self.mask = [], [], []
        for row_outputs, column in zip(outputs, columns, strict=False):
            new_T = torch.tensor(row_outputs[PROMPT_TOKENS - 1 : -1])
            self.ratio.append((new_T - torch.tensor(column["old_log_probs"])).exp())
            self.advantage.append(torch.tensor(column["advantages"]))
            self.mask.append(torch.tensor(column["response_mask"]))

    def sums(self) -> torch.Tensor:
        """[B] sums of PPO's terms over a response's sampled tokens."""
        rows = zip(self.ratio, self.advantage, self.mask, strict=True)
        return torch.stack([(clipped(ratio, advantage) * mask).sum() for ratio, advantage, mask in rows])

    @property
    def counts(self) -> torch.Tensor:
        return torch.stack([mask.sum() for mask in self.mask])


def clipped(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's term, with the dual clip at 3 (arXiv 1912.09729, Eq. 5)."""
    term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return torch.where(advantage < 0, torch.maximum(term, 3 * advantage), term)


def test_each_of_four_updates_clips_the_ratio_to_the_engine(runs: dict[str, dict[str, Any]]):
    """old_log_prob = "rollout" without weights: each by the log-probabilities of its own pass."""
    run = runs["engines"]
    batch = Batch(run["during"], updates=2)
    sums, counts = batch.sums().split(4), batch.counts.split(4)
    expected = [float(-of_update.sum() / tokens.sum()) for of_update, tokens in zip(sums, counts, strict=True)]
    assert run["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5) and len(expected) == 4
    first = Batch(run["before"], updates=2).sums().split(4)
    stale = [float(-of_update.sum() / tokens.sum()) for of_update, tokens in zip(first, counts, strict=True)]
    assert abs(run["loss"][-1] - stale[-1]) > 1e-3, "the weights have moved by then"


def test_an_update_without_a_token_to_learn_from_changes_nothing(runs: dict[str, dict[str, Any]]):
    run = runs["masked"]
    assert run["loss"][0] == 0 and run["grad_norm"][0] == 0
    assert run["grad_norm"][1] > 1e-3, "the next update learns"
    assert all(abs(value) < 1e3 for row_outputs in run["after"] for value in row_outputs)
