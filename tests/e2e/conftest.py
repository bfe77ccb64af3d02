"""One tiny task for all end-to-end tests, and a mark by which a test finds its processes."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from retool_mcore.platforms import get_platform
from tests.e2e.commands import argv_sft, assert_nothing_left, sft_settings, succeed
from tests.e2e.update_probe import probe


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from retool_mcore.data.tasks import TaskSpec, make_task

    get_platform("cpu").activate()
    folder = tmp_path_factory.mktemp("task")
    make_task(folder, 0, TaskSpec(sft_train=256, sft_val=32, rl_train=64, rl_val=8, eval=8))
    return folder


TP2 = ("parallel.tp=2", "optim.betas=[0.8, 0.95]")


@pytest.fixture(scope="session")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of SFT, whose checkpoints any layout can resume.

    What its updates saw is in ``probe``, in the same folder.
    """
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as environment:
        probe(environment, root / "probe")
        words = sft_settings(task, root, "run.name=whole", "checkpoint.reshardable=true", *TP2)
        succeed(argv_sft(*words), "whole")
    return root / "whole"


@pytest.fixture
def mark() -> Iterator[str]:
    """A test's processes have it in their environment; none may be left at its end."""
    made = uuid.uuid4().hex
    yield made
    assert_nothing_left(made)
