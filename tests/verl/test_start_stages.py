"""The stages that are read off verl's log: verl still says these words, in this order."""

from __future__ import annotations

import importlib.util
import logging
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


def test_a_part_that_is_ready_begins_the_next_stage_once(tmp_path: Path):
    log = logging.getLogger(TRAINER_LOG)
    before, log.level = log.level, logging.INFO
    follow(tmp_path)
    try:
        log.info("worker group kwargs: {}")
        for name in ("actor", "critic"):
            log.info(f"create worker group {name}")
        log.info("reward loop manager initialized")
    finally:
        log.removeHandler(log.handlers[-1])
        log.level = before
    assert [stage for stage, _ in begun(tmp_path)] == ["model", "engines"]
