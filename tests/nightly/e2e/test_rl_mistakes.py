"""Mistakes in data and batches are found before an RL run starts."""

from pathlib import Path

import pytest

from tests import forked
from tests.e2e.commands import (
    argv_rl,
    assert_one_error,
)
from tests.e2e.test_rl import settings

pytestmark = [pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("data.train_file=absent.parquet",), "absent.parquet"),
        (("train.prompts_per_step=400", "train.mini_batch_prompts=400"), "fewer than train.prompts_per_step = 400"),
    ],
)
def test_mistakes_in_data_and_batches_are_found_before_the_run(
    task: Path, tmp_path: Path, more: tuple[str, ...], message: str
):
    done = forked.run(*argv_rl(*settings(task, tmp_path, *more))[1:])
    assert_one_error(done, message)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("verl.yaml"))
