"""What each shipped configuration changes in verl's settings is what was recorded, and every key is
one of verl's.

A change of ours shows as the keys it changes, one of verl's defaults as another fingerprint. Where
it is meant: python -m tests.golden.record, and the diff is read.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forked

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="platform cpu refuses an accelerator"),
]

HERE = Path(__file__).parents[1] / "golden"
CONFIGS = HERE.parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    done = forked.run("tests.golden.record", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_resolves_to_what_was_recorded(name: str, trees: Path):
    recorded, now = read(HERE / f"{name}.yaml"), read(trees / f"{name}.yaml")
    default = "verl's default"
    changed = [
        f"{key}: {recorded.get(key, default)!r} -> {now.get(key, default)!r}"
        for key in sorted({*recorded, *now})
        if (key in recorded, recorded.get(key)) != (key in now, now.get(key))
    ]
    assert not changed, "\n".join(["python -m tests.golden.record, if this is meant:", *changed])


def test_verls_defaults_are_those_that_the_records_differ_from(trees: Path):
    """Or the records say less than the whole tree."""
    recorded, now = (json.loads((folder / "verl_defaults.json").read_text()) for folder in (HERE, trees))
    assert now == recorded, "verl's own settings changed: read its changes, then python -m tests.golden.record"
