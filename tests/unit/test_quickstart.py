"""The quickstart's stages: skipped when done, timed over all tries, and honest about a failure."""

import json
import shutil
from pathlib import Path

import pytest

from retool_mcore import quickstart
from retool_mcore.quickstart import StageFailed, run
from retool_mcore.run import start


def test_a_start_of_minutes_says_where_it_stands(tmp_path: Path):
    look = quickstart._watch(tmp_path, 24, "accuracy")
    assert look() == (0, None, "starting")
    start.begin(tmp_path, "checks")
    start.begin(tmp_path, "engines")
    assert look() == (0, None, "starting the rollout engines")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "accuracy": 0.5}) + "\n")
    assert look() == (3, 24, "step 3/24, accuracy 0.500")


def test_an_evaluation_says_how_many_answers_it_has(tmp_path: Path):
    files = [tmp_path / "a", tmp_path / "b"]
    look = quickstart._watch_samples(files)
    assert look() == (0, None, "starting the engine")
    files[0].write_text("{}\n{}\n{")
    assert look() == (2, 1024, "2 of 1024 answers")
    files[0].write_text("{}\n{}\n{}\n")
    files[1].write_text("{}\n")
    assert look() == look() == (4, 1024, "4 of 1024 answers")


def test_another_seed_in_the_same_folder_is_refused(tmp_path: Path):
    (tmp_path / "seed").write_text("7")
    with pytest.raises(StageFailed, match="has a quickstart with seed 7, not 0"):
        run(tmp_path, 0)


def test_a_finished_quickstart_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """All stages were done before, so nothing is trained; the folder is a recorded quickstart's."""
    root = tmp_path / "quickstart"
    shutil.copytree(Path(__file__).parents[1] / "report" / "quickstart", root)
    run(root, 0)
    assert f"report       {root}/report.html" in capsys.readouterr().out.replace("\n", "")
    text = (root / "report.html").read_text(encoding="utf-8")
    assert "sft, tool_rl and text_rl" in text and "0.322 → 0.918" in text
