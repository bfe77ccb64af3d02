"""What our part of verl's trainers makes of its timers and of its workers' errors, without starting
one.
"""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator"),
]
SCRIPT = """
import json
from retool_mcore.platforms import get_platform
get_platform("cpu").activate()
from ray.exceptions import RayTaskError
from retool_mcore.errors import CheckpointError
from retool_mcore.verl.trainer import phase_times, unwrap_worker_errors

def said(cause):
    try:
        with unwrap_worker_errors():
            raise RayTaskError("save", "the way through Ray", cause).as_instanceof_cause()
    except Exception as error:
        return [type(error).__name__, str(error)]

timers = {"gen": 6.0, "engine_sleep": 1.0, "reward": 0.5, "update_actor": 3.0, "step": 11.0}
timers |= {"testing": 4.0, "start_profile": 1.0}
print(json.dumps({
    "times": phase_times(timers, 2.0),
    "waited_longer_than_sampled": phase_times(timers, 9.0),
    "for_the_user": said(CheckpointError("no space is left")),
    "bug": said(KeyError("actor")),
}))
"""


@pytest.fixture(scope="module")
def answers() -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_phases_add_up_to_the_step_and_waiting_for_calls_is_one_of_them(answers: dict):
    times = answers["times"]
    assert times["timing_s/gen"] == 6.0 and times["timing_s/tool_wait"] == 2.0
    assert times["timing_s/engine_sleep"] == 1.0
    assert times["timing_s/other"] == pytest.approx(1.5) and times["timing_s/testing"] == 4.0
    parts = [times[f"timing_s/{name}"] for name in ("gen", "reward", "update_actor", "other")]
    assert sum(parts) == pytest.approx(times["timing_s/step"])


def test_a_wait_is_never_more_than_the_generation_that_it_is_part_of(answers: dict):
    times = answers["waited_longer_than_sampled"]
    assert times["timing_s/tool_wait"] == 5.0, "6 s of sampling, of which the engines took 1 s to sleep"


def test_a_workers_error_reaches_the_user_in_its_own_words_and_a_bug_keeps_its_traceback(answers: dict):
    assert answers["for_the_user"] == ["CheckpointError", "no space is left"]
    assert answers["bug"][0] == "RayTaskError(KeyError)" and "the way through Ray" in answers["bug"][1]
