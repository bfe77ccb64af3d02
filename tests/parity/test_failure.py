"""What a user is told when a process of an RL run dies or fails."""

import re
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
from retool_mcore.verl.failure import LAST_LINES, last_lines
from tests.scenario import run_scenario


def test_the_last_lines_are_those_of_the_process_alone(tmp_path: Path):
    log = tmp_path / "rl.log"
    mine = [f"\x1b[36m(WorkerDict pid=42)\x1b[0m line {number}" for number in range(20)]
    others = [f"\x1b[36m(Router pid=421, ip=10.0.0.2)\x1b[0m other {number}" for number in range(20)]
    log.write_text("\n".join(line for pair in zip(mine, others, strict=True) for line in pair) + "\n\xff\n", "utf-8")
    assert last_lines(log, 42) == [f"line {number}" for number in range(20 - LAST_LINES, 20)]
    assert last_lines(log, 421)[-1] == "other 19"
    assert last_lines(log, 4) == []


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_scenario("tests.parity.failure_scenario", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("loss", ["die", "ask", "listed"])
def test_a_dead_process_is_named_with_the_log_and_the_way_on(told: dict[str, list[str]], loss: str):
    kind, text = told[loss]
    assert kind == "RunError"
    said = r"Worker \(process \d+\) died\. If it ran out of memory, dmesg shows the kill\. The log is \S+/rl\.log\. "
    assert re.match(said, text), text
    assert text.endswith("No checkpoint was complete: the same command starts from the beginning.")
    assert "\n" not in text


def test_an_actor_that_the_run_has_killed_is_no_loss(told: dict[str, list[str]]):
    assert told["before"] == ["None"]


def test_an_exception_is_told_by_its_first_line(told: dict[str, list[str]]):
    kind, text = told["fail"]
    assert kind == "RunError"
    assert re.match(r"Worker\.fail \(process \d+\) failed with KeyError: 'no such thing'\. The log is ", text), text


def test_what_hydra_could_not_build_is_told_with_its_cause(told: dict[str, list[str]]):
    assert "read_text': FileNotFoundError(2, " in told["instantiate"][1], told["instantiate"]


def test_a_workers_own_error_for_the_user_stays_as_it_is(told: dict[str, list[str]]):
    assert told["refuse"] == ["ConfigError", "train.steps = 0 is too few"]
