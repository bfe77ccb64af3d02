"""The pages' pictures: small, each on a page, and each made by docs/pictures.py."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.png"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_small_and_on_a_page(picture: Path):
    assert picture.stat().st_size < 200_000
    assert any(f"](pictures/{picture.name})" in page.read_text() for page in DOCS.glob("*.md"))
