"""The stages that are read off verl's log: verl still says these words, in this order."""

import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.run.start import STAGES, begun
from retool_mcore.verl.start_stages import BEGINS, TRAINER_LOG, follow


def test_verls_trainer_logs_these_words_in_this_order():
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    text = (folder / "trainer/ppo/v1/trainer_base.py").read_text(encoding="utf-8")
    places = [text.index(f'"{words}') for words in BEGINS]
    assert places == sorted(places)
    stages = list(STAGES)
    assert [stages.index(stage) for stage in BEGINS.values()] == sorted(map(stages.index, BEGINS.values()))
    assert ".".join(("verl", "trainer", "ppo", "v1", "trainer_base")) == TRAINER_LOG


def stages_of(run_dir: Path, said: Iterable[str], *, detached_engines: bool) -> list[str]:
    log = logging.getLogger(TRAINER_LOG)
    before, log.level = log.level, logging.INFO
    follow(run_dir, detached_engines=detached_engines)
    try:
        for words in said:
            log.info(words)
    finally:
        log.removeHandler(log.handlers[-1])
        log.level = before
    return [stage for stage, _ in begun(run_dir)]


def test_a_part_that_is_ready_begins_the_next_stage_once(tmp_path: Path):
    groups = [f"create worker group {name}" for name in ("actor", "critic")]
    said = ["worker group kwargs: {}", *groups, "reward loop manager initialized"]
    assert stages_of(tmp_path, said, detached_engines=False) == ["model", "engines"]


def test_engines_apart_are_started_when_all_else_is_there(tmp_path: Path):
    """Their start took 92 s on two H200, under the name of the agent loops."""
    assert stages_of(tmp_path, BEGINS, detached_engines=True) == ["model", "reward", "checkpoint", "engines"]
