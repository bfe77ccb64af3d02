from pathlib import Path

import pytest

from retool_mcore.data.tasks import TaskSpec, make_task


@pytest.fixture(scope="package")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's task, smaller."""
    folder = tmp_path_factory.mktemp("task")
    make_task(folder, 0, TaskSpec(sft_train=32, sft_val=8, rl_train=32, rl_val=8, eval=8))
    return folder
