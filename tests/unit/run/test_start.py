"""The stages of a start: written as they begin, read by the progress line and the first row."""

import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.run import start
from retool_mcore.run.status import print_text
from retool_mcore.train import rl
from tests.terminal import CONTROL

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"


def test_seconds_are_between_the_beginnings_whatever_is_done_to_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is set back by an hour between the first two."""
    now, clock = iter([9000.0, 5403.5, 5410.0]), iter([100.0, 103.5, 110.0])
    monkeypatch.setattr(start.time, "time", lambda: next(now))
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    for stage in ("checks", "ray", "steps"):
        start.begin(tmp_path, stage)
    assert start.start_times(tmp_path) == {
        "timing_s/start/checks": 3.5,
        "timing_s/start/ray": 6.5,
        "timing_s/start": 10.0,
    }


def test_seconds_of_a_run_from_before_are_by_its_clock(tmp_path: Path):
    lines = ('{"stage": "checks", "unix_s": 100.0}', '{"stage": "ray", "unix_s": 103.5}')
    (tmp_path / "start.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert start.start_times(tmp_path) == {"timing_s/start/checks": 3.5, "timing_s/start": 3.5}


def test_stages_before_the_folder_is_held_are_written_with_the_first_one_after(tmp_path: Path):
    (tmp_path / "start.jsonl").write_text('{"stage": "update", "unix_s": 1.0}\n')
    started = time.time()
    start.begin_early("settings")
    start.begin_early("processes")
    assert len(start.begun(tmp_path)) == 1, "another process may be holding it"
    start.begin(tmp_path, "data")
    start.begin(tmp_path, "model")
    names, times = zip(*start.begun(tmp_path), strict=True)
    assert names == ("settings", "processes", "data", "model")
    assert sorted(times) == list(times) and times[0] >= started
    assert not start.early(), "a run that this one starts begins anew"


def test_another_start_begins_anew_and_a_cut_line_is_left_out(tmp_path: Path):
    for stage in ("checks", "ray", "checks"):
        start.begin(tmp_path, stage)
    assert [stage for stage, _ in start.begun(tmp_path)] == ["checks"]
    with open(tmp_path / "start.jsonl", "a") as file:
        file.write('{"stage": "r')
    assert [stage for stage, _ in start.begun(tmp_path)] == ["checks"]


def test_before_any_stage_there_is_nothing(tmp_path: Path):
    assert start.begun(tmp_path) == [] and start.start_times(tmp_path) == {}


def test_without_a_terminal_each_stage_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also when the run has rows of an earlier start."""
    monkeypatch.setattr(rl, "PROGRESS_INTERVAL_S", 0.02)
    config = load_config(RlConfig, RL, [f"run.root={tmp_path}"])
    config.run.dir.mkdir()
    (config.run.dir / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "critic/rewards/mean": 0.5, "unix_s": 1.0}) + "\n"
    )
    said = io.StringIO()
    with rl.progress(config, Console(file=said)):
        for stage in ("checks", "ray", "engines"):
            start.begin(config.run.dir, stage)
            time.sleep(0.2)
    lines = [line.split(" s  ", 1)[1] for line in said.getvalue().splitlines() if " s  " in line]
    assert lines == [start.STAGES[stage] for stage in ("checks", "ray", "engines")]


@pytest.mark.parametrize(("stages", "told"), [(["checks"], []), (["checks", "ray"], ["checks"])])
def test_of_a_start_that_fails_at_once_its_newest_stage_is_not_told(tmp_path: Path, stages: list[str], told: list[str]):
    config = config_in(tmp_path)
    said = io.StringIO()
    with pytest.raises(ConfigError), rl.progress(config, Console(file=said)):
        for stage in stages:
            start.begin(config.run.dir, stage)
        raise ConfigError("a mistake")
    assert [line.split(" s  ")[1] for line in said.getvalue().splitlines()] == [start.STAGES[stage] for stage in told]


def test_without_a_terminal_each_new_step_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A row of an earlier start is not told again."""
    monkeypatch.setattr(rl, "PROGRESS_INTERVAL_S", 0.02)
    config = load_config(RlConfig, RL, [f"run.root={tmp_path}", "train.steps=2"])
    config.run.dir.mkdir()
    said = io.StringIO()
    with open(config.run.dir / "metrics.jsonl", "w") as metrics:
        print(json.dumps({"step": 1, "critic/rewards/mean": 0.5, "unix_s": 1.0}), file=metrics, flush=True)
        with rl.progress(config, Console(file=said)):
            start.begin(config.run.dir, "checks")
            time.sleep(0.2)
            print(json.dumps({"step": 2, "critic/rewards/mean": -0.5, "unix_s": time.time()}), file=metrics, flush=True)
            time.sleep(0.2)
    assert [line for line in said.getvalue().splitlines() if line.startswith("step")] == ["step 2/2  reward -0.500"]


def config_in(folder: Path) -> RlConfig:
    config = load_config(RlConfig, RL, [f"run.root={folder}", "train.steps=2"])
    config.run.dir.mkdir()
    return config


def shows(config: RlConfig, row: dict[str, float] | None) -> str:
    """What a terminal is sent by a start that makes a step, or none."""
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=80)
    with rl.progress(config, console):
        start.begin(config.run.dir, "checks")
        print_text(console, "note: of the start")
        if row is not None:
            (config.run.dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return said.getvalue()


def test_a_note_of_the_start_stands_on_a_line_of_its_own(tmp_path: Path):
    lines = re.split(r"[\r\n]+", CONTROL.sub("", shows(config_in(tmp_path), None)))
    assert "note: of the start" in lines
    assert not any("note" in line and "rl" in line for line in lines)


def test_the_bar_stays_only_where_a_step_was_made(tmp_path: Path):
    erased = "\r\x1b[1A\x1b[2K"
    config = config_in(tmp_path)
    assert shows(config, None).endswith(erased)
    assert not shows(config, {"step": 1, "critic/rewards/mean": 0.5, "unix_s": 7.0}).endswith(erased)
    assert shows(config, None).endswith(erased), "that step was an earlier start's"


def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An earlier start's row is from tomorrow; the start and its step are shown all the same."""
    monkeypatch.setattr(rl, "PROGRESS_INTERVAL_S", 0.02)
    config = config_in(tmp_path)
    rows = [{"step": 1, "critic/rewards/mean": 0.5, "unix_s": time.time() + 86400}]
    (config.run.dir / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    said = io.StringIO()
    with rl.progress(config, Console(file=said)):
        start.begin(config.run.dir, "checks")
        time.sleep(0.2)
        rows.append({"step": 2, "critic/rewards/mean": -0.5, "unix_s": time.time()})
        (config.run.dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = said.getvalue().splitlines()
    assert len(told) == 2 and told[0].endswith(start.STAGES["checks"]) and told[1] == "step 2/2  reward -0.500"
