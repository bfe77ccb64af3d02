"""Trackers by their own libraries: what each keeps of a run that resumes, and that none ends it."""

import importlib.util
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from retool_mcore.config import SftConfig, load_config, load_evaluation
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate import cases
from retool_mcore.platforms.base import get_platform
from retool_mcore.preflight.machine import settings
from retool_mcore.run import trackers
from retool_mcore.run.metrics import MetricWriter, read_metrics
from retool_mcore.run.status import notes, notes_on
from retool_mcore.run.trackers import Trace

CONFIGS = Path(__file__).parents[3] / "configs"
SFT, RL = CONFIGS / "sft_tiny_cpu.toml", CONFIGS / "rl_tiny_cpu.toml"


def run_in(folder: Path, *names: str) -> SftConfig:
    """A run whose folder is ``folder``, with these trackers, or the default ones."""
    chosen = [f"run.trackers={json.dumps(names)}"] if names else []
    return load_config(SftConfig, SFT, [f"run.root={folder.parent}", f"run.name={folder.name}", *chosen])


class Fake(trackers.TrackerWithoutPurge):
    """A library that holds what it was given, and whose third step fails."""

    name = "wandb"
    opened: list[tuple[str, str]]
    logged: list[tuple[int, Mapping[str, float]]]

    def open(self, name: str, config: Mapping[str, Any], known: str) -> str:
        self.opened.append((name, known))
        return known or f"id{len(self.opened)}"

    def write(self, row: Mapping[str, float], step: int, traces: Sequence[trackers.Trace]) -> None:
        self.logged.append((step, row))
        if step == 3:
            raise OSError("the network is gone")

    def close(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setitem(trackers.LIBRARIES, "wandb", Fake)
    Fake.opened, Fake.logged = [], []
    return Fake


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*start: object) -> trackers.TrackerWithoutPurge:
        raise RuntimeError("no key")

    monkeypatch.setitem(trackers.LIBRARIES, "swanlab", refuse)
    said = io.StringIO()
    with notes_on(Console(file=said)):
        writer = MetricWriter(run_in(tmp_path, "wandb", "tensorboard", "swanlab"), resumed_step=0)
        for step in range(1, 6):
            writer.write(step, {"loss": 1.0, "actor/loss": 2.0})
        writer.close()
    notes.warning("after the run, to nobody")
    assert fake.logged == [(step, {"loss": 1.0}) for step in (1, 2, 3)], "what metrics.jsonl has"
    lines = said.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["swanlab", "wandb"]
    assert lines[0].endswith("error: no key") and lines[1].endswith("error: the network is gone")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_continues_its_own_and_one_that_starts_over_begins_another(tmp_path: Path, fake: type[Fake]):
    for resumed, steps in ((0, (1, 2)), (1, (2,)), (0, (1,))):
        writer = MetricWriter(run_in(tmp_path, "wandb"), resumed_step=resumed)
        for step in steps:
            writer.write(step, {"loss": 1.0})
        writer.close()
    assert fake.opened == [(tmp_path.name, known) for known in ("", "id1", "")]
    assert [step for step, _ in fake.logged] == [1, 2, 1], "a step is not logged again"
    assert trackers._mlflow_name("val-core/a b/acc/mean@8") == "val-core/a b/acc/mean_8"


def test_a_tracker_that_is_not_installed_is_an_error_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where a folder of that name lies in the working directory: Python finds that one."""
    for found in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        first = next(settings(run_in(tmp_path, "mlflow"), get_platform("cpu")))
        assert first.severity == "missing" and "pip install 'retool_mcore[mlflow]'" in first.text


@pytest.mark.parametrize(
    ("environ", "netrc", "lacks"),
    [
        ({}, False, True),
        ({"WANDB_MODE": "offline"}, False, False),
        ({"WANDB_API_KEY": "k"}, False, False),
        ({}, True, False),
        ({"WANDB_BASE_URL": "https://example.org"}, True, True),
    ],
)
def test_a_run_for_wandb_without_a_key_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], netrc: bool, lacks: bool
):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    for name, value in ({"HOME": str(tmp_path)} | environ).items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    config = run_in(tmp_path / "run", "wandb")
    said = r"no API key was found .*wandb login.*WANDB_MODE=offline"
    with pytest.raises(ConfigError, match=said) if lacks else nullcontext():
        trackers.check_trackers(config)


def board_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return board


def test_an_evaluation_logs_each_case_once(tmp_path: Path):
    report = {"scores": {"mean@2": 0.5}, "behavior": {"behavior/turns": 2.0}}
    for name in ("base", "base", "tuned"):
        cases._track(load_evaluation(RL), tmp_path, name, report)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "report.json").write_text("{}")
    board = board_of(tmp_path)
    assert {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]} == {
        "eval/base/mean@2": [(1, 0.5)],
        "eval/base/behavior/turns": [(1, 2.0)],
        "eval/tuned/mean@2": [(2, 0.5)],
        "eval/tuned/behavior/turns": [(2, 2.0)],
    }


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
    writer.write(1, {"loss": 1.0, "val/mean@8": float("nan")}, [row("a", False), row("b", True)])
    writer.write(2, {"loss": 2.0})
    writer.close()
    time.sleep(1.1)  # wandb and SwanLab name a start's folder by the second
    writer = MetricWriter(config, resumed_step=1)
    writer.write(2, {"loss": 3.0}, [row("again", True)])
    writer.close()


def test_tensorboard_has_a_text_for_each_that_is_no_markup(tmp_path: Path):
    write_two_steps(tmp_path, "tensorboard")
    board = board_of(tmp_path)
    tags = [f"trajectories/{number}/text_summary" for number in (1, 2)]
    assert set(board.Tags()["tensors"]) == set(tags)
    events = [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors(tags[0])]
    assert [step for step, _ in events] == [1, 2]
    assert "    trajectory: a, extracted: None, right: False" in events[0][1]
    assert "\n    # <script>alert(1)</script>\n    ![x](http" in events[0][1], "four spaces: code, no markup"
