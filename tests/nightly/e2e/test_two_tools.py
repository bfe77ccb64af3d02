"""The example of two tools, from your own conversations to RL, by the commands of its page."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import ROOT, argv_retool, succeed

pytestmark = [pytest.mark.timeout(2400)]
PAGE = ROOT / "docs" / "tool_and_reward.md"


def commands(root: Path) -> list[list[str]]:
    """The words of each command, with ``root`` for the folder of runs."""
    section = PAGE.read_text(encoding="utf-8").partition("### From your own conversations to RL with two tools")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    lines = block[1].replace("\\\n", " ").replace("runs/", f"{root}/").strip().splitlines()
    return [shlex.split(line) for line in lines]


def test_the_pages_commands_teach_both_tools_and_rl_improves(tmp_path: Path, mark: str):
    held_out = f'validation.files=["{tmp_path}/two_tools/rl_val.parquet"]'
    more = {
        "sft": [f"run.root={tmp_path}"],
        "rl": [
            f"run.root={tmp_path}",
            f"model.path={tmp_path}/sft_two_tools/export",
            f"data.train_file={tmp_path}/two_tools/rl_train.parquet",
            held_out,
        ],
    }
    for program, *words in commands(tmp_path):
        argv = [*words, *more.get(words[0], [])]
        succeed([sys.executable, *argv] if program == "python" else argv_retool(*argv), mark, timeout_s=1200)
    before, *rows = read_metrics(tmp_path / "rl_two_tools" / "metrics.jsonl")
    assert len(rows) == 16
    assert all(row["behavior/calls/lookup"] > 1.5 for row in rows), "both prices are looked up"
    assert rows[-1]["val/accuracy"] > before["val/accuracy"] + 0.15
