"""A step's trajectories in each tracker, read back from the library's own files."""

import time
from pathlib import Path

import pytest

from retool_mcore.run.metrics import MetricWriter
from retool_mcore.run.trackers import Trace
from tests.unit.run.test_trackers import run_in

HOSTILE = "# <script>alert(1)</script>\n![x](http://example.org)"


def row(name: str, right: bool) -> Trace:
    return {
        "trajectory": name,
        "prompt": f"What is 6 times 7?\n{HOSTILE}",
        "response": "42",
        "extracted": None if not right else "42",
        "right": right,
        "reward": 1.0 if right else -1.0,
        "calls": 2,
    }


def write_two_steps(folder: Path, tracker: str) -> None:
    """Step 1 with two trajectories, step 2 with none; after a resume step 2 again, with one."""
    config = run_in(folder, tracker)
    writer = MetricWriter(config, resumed_step=0)
    writer.write(1, {"loss": 1.0}, [row("a", False), row("b", True)])
    writer.write(2, {"loss": 2.0})
    writer.close()
    time.sleep(1.1)  # wandb and SwanLab name a start's folder by the second
    writer = MetricWriter(config, resumed_step=1)
    writer.write(2, {"loss": 3.0}, [row("again", True)])
    writer.close()


def test_tensorboard_has_a_text_for_each_that_is_no_markup(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_two_steps(tmp_path, "tensorboard")
    board = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = [f"trajectories/{number}/text_summary" for number in (1, 2)]
    assert set(board.Tags()["tensors"]) == set(tags)
    events = [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors(tags[0])]
    assert [step for step, _ in events] == [1, 2]
    assert "    trajectory: a, extracted: None, right: False" in events[0][1]
    assert "\n    # <script>alert(1)</script>\n    ![x](http" in events[0][1], "four spaces: code, no markup"
