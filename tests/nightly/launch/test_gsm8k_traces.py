"""At least 85 % of GSM8K survive the conversion."""

import os
from pathlib import Path

import pytest

import tests.unit.launch.gsm8k  # noqa: F401  it knows where the scripts are
from retool_mcore.data.files import read_source
from retool_mcore.sandbox import open_sandbox

# isort: split
from traces import build


def gsm8k_train() -> Path | None:
    """The whole training set: RETOOL_DATA, or shared/data next to the repository."""
    folder = Path(os.environ.get("RETOOL_DATA", Path(__file__).parents[4] / "shared" / "data"))
    path = folder / "gsm8k" / "train.jsonl"
    return path if path.is_file() else None


@pytest.mark.skipif(gsm8k_train() is None, reason="needs GSM8K: set RETOOL_DATA to a folder with gsm8k/train.jsonl")
async def test_at_least_85_percent_of_gsm8k_survive():
    rows = list(read_source(str(gsm8k_train())))
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        report = await build(rows, sandbox)
    assert len(rows) == 7473
    assert report.problems + len(report.rejects) == 7473
    assert report.share_kept >= 0.85
