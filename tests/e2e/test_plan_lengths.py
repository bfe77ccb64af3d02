"""`retool plan` says where its lengths come from."""

from pathlib import Path

from typer.testing import CliRunner

from retool_mcore.cli.planner import app
from tests.unit.planner.plans import CONFIGS
from tests.unit.planner.test_data_lengths import folder  # noqa: F401  a fixture


def test_the_command_says_where_its_lengths_are_from(folder: Path):
    words = [f"model.path={folder}/model", f"data.train_file={folder}/rl.parquet", "--hardware", "h200x1"]
    done = CliRunner().invoke(app, [str(CONFIGS / "rl_tiny_cpu.toml"), *words])
    assert "rl.parquet have" in done.output.replace("\n", " "), done.output
