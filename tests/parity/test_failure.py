"""The errors of an RL run whose process dies or fails."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
from retool_mcore.verl import failure
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


def test_a_run_resumes_from_its_newest_checkpoint(monkeypatch: pytest.MonkeyPatch):
    saved = [SimpleNamespace(step=step, path=f"global_step_{step}") for step in (4, 8)]
    monkeypatch.setattr(failure.checkpoint, "complete_checkpoints", lambda folder: saved)
    config = SimpleNamespace(run=SimpleNamespace(dir=Path("run")), checkpoint=SimpleNamespace(resume="auto"))
    assert failure._how_to_resume(config).endswith("resumes after step 8, from global_step_8.")
    config.checkpoint.resume = "never"
    assert failure._how_to_resume(config).startswith('With checkpoint.resume = "auto" the same command resumes after')


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_scenario("tests.parity.failure_scenario", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("loss", ["die", "ask", "listed"])
def test_a_dead_process_is_named_with_the_log(errors: dict[str, list[str]], loss: str):
    kind, text = errors[loss]
    assert kind == "RunError"
    message = r"Worker \(process \d+\) died\. If it ran out of memory, dmesg shows the kill\. The log is \S+/rl\.log\. "
    assert re.match(message, text), text
    assert text.endswith("No checkpoint was complete: the same command starts from the beginning.")
    assert "\n" not in text


def test_an_actor_that_the_run_killed_is_not_an_error(errors: dict[str, list[str]]):
    assert errors["before"] == ["None"]


def test_an_exception_is_shown_by_its_first_line(errors: dict[str, list[str]]):
    kind, text = errors["fail"]
    assert kind == "RunError"
    assert re.match(r"Worker\.fail \(process \d+\) failed with KeyError: 'no such thing'\. The log is ", text), text


def test_a_failed_instantiation_is_shown_with_its_cause(errors: dict[str, list[str]]):
    assert "read_text': FileNotFoundError(2, " in errors["instantiate"][1], errors["instantiate"]


def test_a_workers_own_error_for_the_user_stays_as_it_is(errors: dict[str, list[str]]):
    assert errors["refuse"] == ["ConfigError", "train.steps = 0 is too few"]
