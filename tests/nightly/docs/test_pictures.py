"""The script makes all pictures of the pages."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.nightly.report.test_browser import pytestmark as needs_chromium

DOCS = Path(__file__).parents[3] / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.png"))


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@needs_chromium
def test_the_script_makes_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = script()
    monkeypatch.setattr(module, "TO", tmp_path)
    module.main([])
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in PICTURES]
