"""A dry run notes what is not here, a start refuses it, and both show the first prompt."""

from pathlib import Path

from retool_mcore.platforms import get_platform
from retool_mcore.preflight.check import Machine, check
from retool_mcore.preflight.findings import Finding, require
from tests.unit.preflight.test_check import (
    ELSEWHERE,
    own_code,  # noqa: F401  a fixture
    wrong,
)
from tests.unit.preflight.test_preflight import RL, good, settings, task  # noqa: F401  a fixture


def notes(found: list[Finding]) -> str:
    return " ".join(each.text for each in found if each.severity == "note")


def test_what_is_not_here_is_a_note_for_a_dry_run_and_an_error_for_a_start(task: Path):
    absent = good(
        task, "model.path=runs/absent", "data.train_file=absent.parquet", "reward.function=own_mistakes:of_extra_info"
    )
    found = check(absent, ELSEWHERE)
    require(found)
    told = notes(found)
    assert "model.path = runs/absent does not exist" in told and "data.train_file = absent.parquet not found" in told
    assert "The row was made up" in told
    start = " ".join(wrong(absent, Machine(platform=get_platform("cpu"))))
    assert "model.path = runs/absent does not exist" in start and "data.train_file = absent.parquet not found" in start
