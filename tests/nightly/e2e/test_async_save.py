"""A disk that fills up while a checkpoint is written is one error."""

from pathlib import Path

from tests.e2e.commands import (
    assert_one_error,
    run,
)
from tests.e2e.test_async_save import (
    argv,
    disk,  # noqa: F401  a fixture
    saved_steps,
)


def test_a_disk_that_fills_up_behind_the_steps_is_one_clear_error(task: Path, tmp_path: Path, mark: str, disk: Path):
    (disk / "full").touch()
    done = run(argv(task, tmp_path, "run.name=full", "checkpoint.asynchronous=true"), mark)
    assert_one_error(done, "no space is left for")
    assert "[rank" not in done.stderr  # torch's mark of a rank's traceback
    assert saved_steps(tmp_path / "full") == [3]
