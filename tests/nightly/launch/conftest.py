from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nightly.launch.scripts import Scripts


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    made = Scripts(tmp_path)
    yield made
    made.stop()
