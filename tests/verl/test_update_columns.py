"""Columns of tokens that a worker makes of what verl's queue has of a response."""

from typing import Any

import pytest
import torch

from tests.verl.loss_scenario import ENGINE_BT, MASK_BT, MOVED_BT, OLD_BT, actor_config, jagged, micro_batch, said

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
ROWS = range(4)
VALUE_B = torch.tensor([0.5, -1.25, 2.0, -3.0])


def update(**columns: torch.Tensor) -> Any:
    """An update's rows as a worker fetches them."""
    data = micro_batch(ROWS, response_mask=MASK_BT)
    for name, column in columns.items():
        data[name] = column
    return data


@pytest.mark.parametrize("of_engines", [False, True])
def test_a_loss_of_a_number_of_each_response_is_that_of_its_tokens(of_engines: bool):
    from verl.workers.utils.losses import ppo_loss

    from retool_mcore.verl.update_columns import complete

    old_BT = ENGINE_BT if of_engines else OLD_BT
    whole = update(old_log_probs=jagged(old_BT), advantages=jagged(VALUE_B[:, None] * MASK_BT))
    stored = update(advantages=VALUE_B, **{"rollout_log_probs" if of_engines else "old_log_probs": jagged(old_BT)})
    complete(stored)
    assert torch.equal(stored["advantages"].values(), whole["advantages"].values())
    assert stored["advantages"].dtype == torch.float32
    output = said(OLD_BT + MOVED_BT, ROWS)
    found, known = (ppo_loss(actor_config(), {"log_probs": output}, data)[0] for data in (stored, whole))
    assert torch.equal(found, known) and abs(float(known)) > 0.01


def test_what_is_of_tokens_stays_as_it_is():
    from retool_mcore.verl.update_columns import complete

    columns = {"advantages": jagged(MOVED_BT), "old_log_probs": jagged(OLD_BT), "rollout_log_probs": jagged(ENGINE_BT)}
    data = update(**columns)
    complete(data)
    for name, column in columns.items():
        assert torch.equal(data[name].values(), column.values())


def test_the_updates_of_a_worker_have_the_columns(monkeypatch: pytest.MonkeyPatch):
    """Whatever stands between them and the queue."""
    from verl.workers.engine_workers import TrainingWorker

    from retool_mcore.verl.update_worker import UpdateWorker

    seen: list[Any] = []
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda self, data: seen.append(data))
    worker: Any = object.__new__(UpdateWorker)
    UpdateWorker.train_mini_batch.__wrapped__(worker, update(advantages=VALUE_B, rollout_log_probs=jagged(ENGINE_BT)))
    rows = seen[0]["advantages"].unbind()
    assert [row.tolist() for row in rows][:2] == [[0.5] * 3, [-1.25, -1.25, 0, 0, -1.25, -1.25]]
    assert torch.equal(seen[0]["old_log_probs"].values(), jagged(ENGINE_BT).values())
