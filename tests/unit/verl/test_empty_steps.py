"""Steps that train less than all: of masked or rejected responses, and of the critic alone."""

from typing import Any

import pytest
import torch

from retool_mcore.errors import RolloutError
from tests.unit.verl.loss_scenario import MASK_BT, Queue, batch, learning_trainer, trained_on

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def masked(monkeypatch: pytest.MonkeyPatch, mask_BT: torch.Tensor) -> Any:
    """A batch of four responses whose masks are in the queue."""
    Queue(monkeypatch, response_mask=mask_BT)
    return batch()


def test_a_step_of_which_nothing_is_left_to_learn_from_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.replay import require_learnable

    some_BT = MASK_BT * torch.tensor([[1], [0], [0], [0]])
    rows = masked(monkeypatch, some_BT)
    rows.tags[3] = {"is_padding": True}
    assert require_learnable(rows, 3, "x") == pytest.approx(2 / 3), "of the three that are no padding"
    with pytest.raises(RolloutError, match="No response of step 3 has a token to learn from: x excluded"):
        require_learnable(masked(monkeypatch, torch.zeros_like(MASK_BT)), 3, "x")


def test_a_step_looks_where_masks_may_leave_nothing(monkeypatch: pytest.MonkeyPatch):
    trainer = learning_trainer('algorithm.mask=["truncated"]')
    trainer.assign = lambda rows, metrics: rows
    with pytest.raises(RolloutError, match=r'algorithm\.mask = \["truncated"\] excluded all'):
        trainer.learn(masked(monkeypatch, torch.zeros_like(MASK_BT)), {})


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_rejection_of_everything_ends_the_run_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch):
    settings = (f"algorithm.name={name}", "algorithm.rejection=seq_max_k2", "algorithm.rejection_bounds=[0, 1e-9]")
    with pytest.raises(RolloutError, match=r'step 3 has a token.* algorithm.rejection = "seq_max_k2" excluded all'):
        trained_on(monkeypatch, *settings)
