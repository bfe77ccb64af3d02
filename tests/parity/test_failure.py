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


DIED = r"Worker \(process \d+\) died\. If it ran out of memory, dmesg shows the kill\. The log is \S+/rl\.log\. "
DIED += r"No checkpoint was complete: the same command starts from the beginning\.$"


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        ("die", "RunError", DIED),
        ("ask", "RunError", DIED),
        ("listed", "RunError", DIED),
        ("fail", "RunError", r"Worker\.fail \(process \d+\) failed with KeyError: 'no such thing'\. The log is "),
        ("instantiate", "RunError", r".*read_text': FileNotFoundError\(2, "),  # Hydra's error has its cause in line 2
        ("refuse", "ConfigError", r"train\.steps = 0 is too few$"),  # a worker's own error for the user
        ("before", "NoneType", "None"),  # the run itself killed this actor
    ],
)
def test_a_dead_process_or_a_failure_is_one_line(errors: dict[str, list[str]], loss: str, kind: str, message: str):
    found, text = errors[loss]
    assert found == kind and re.match(message, text), text
