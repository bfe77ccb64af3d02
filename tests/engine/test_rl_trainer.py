"""What our part of verl's trainer makes of its timers and of its workers' errors."""

from typing import Any

import pytest

from retool_mcore.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

TIMERS = {"gen": 6.0, "engine_sleep": 1.0, "reward": 0.5, "update_actor": 3.0, "step": 11.0}
TIMERS |= {"testing": 4.0, "start_profile": 1.0}


def raised_for(cause: Exception) -> list[Any]:
    from ray.exceptions import RayTaskError

    from retool_mcore.verl.trainer import unwrap_worker_errors

    try:
        with unwrap_worker_errors():
            raise RayTaskError("save", "the way through Ray", cause).as_instanceof_cause()
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error)]


def phase_times(waited_s: float) -> dict[str, float]:
    from retool_mcore.verl import trainer

    return trainer.phase_times(dict(TIMERS), waited_s)


def test_phases_add_up_to_the_step_and_waiting_for_calls_is_one_of_them():
    times = phase_times(2.0)
    assert times["timing_s/gen"] == 6.0 and times["timing_s/tool_wait"] == 2.0
    assert times["timing_s/engine_sleep"] == 1.0
    assert times["timing_s/other"] == pytest.approx(1.5) and times["timing_s/testing"] == 4.0
    parts = [times[f"timing_s/{name}"] for name in ("gen", "reward", "update_actor", "other")]
    assert sum(parts) == pytest.approx(times["timing_s/step"])


def test_a_workers_error_reaches_the_user_unwrapped_and_a_bug_keeps_its_traceback():
    assert raised_for(CheckpointError("no space is left")) == ["CheckpointError", "no space is left"]
    name, text = raised_for(KeyError("actor"))
    assert name == "RayTaskError(KeyError)" and "the way through Ray" in text
