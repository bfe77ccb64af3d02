"""The pages: their commands run, or are read as far as this machine goes; their settings load;
their Python prints the shown output; their generated parts are up to date.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig
from retool_mcore.config.load import build_config, load_run
from tests.docs.record import filled

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Pages that the site includes or links to, whose commands users take as well.
GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "launch/README.md", "ascend/README.md")]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^ *retool (?:.*\\\n)*.*", re.MULTILINE)
SETTING = re.compile(r"[a-z_]+\.[a-z_0-9.]+=.*", re.DOTALL)
# Of other machines, or with tests of their own.
SLOW = ("task", "fetch", "sft", "protocol", "model")
OWN_DATA = ("rl tests/data/samples/gsm8k_60.jsonl --out data/mine.parquet", "lint data/mine.parquet")


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCED.findall(page.read_text(encoding="utf-8")) if kind == language]


def words_of(line: str) -> list[str]:
    """The words of a command behind `retool`, without its comment and redirections."""
    return shlex.split(line.partition(" < ")[0], comments=True)[1:]


def runnable(line: str) -> bool:
    words = words_of(line)
    absent = ("two_tools", "my_", "--like", "data/", "CONFIG", "[", "run.sh", "FILE", "DIR", "SOURCE")
    here = words[0] in ("plan", "config", "get", "parse") or (words[0] == "data" and words[1] not in SLOW)
    return here and not any(part in line for part in absent)


ALL = dict.fromkeys(
    line.replace("\\\n", " ").strip()
    for page in [*PAGES, *GUIDES]
    for line in COMMAND.findall(page.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("line", ALL)
def test_a_command_has_the_options_and_settings_that_the_page_gives(line: str):
    """As click and the configuration read them; nothing runs."""
    command: Any = typer.main.get_command(all_commands())
    words = words_of(line)
    context = command.make_context("retool", words, resilient_parsing=False)
    # What a group has not read is in both: its command's name is protected.
    while hasattr(command, "commands") and (left := [*getattr(context, "_protected_args", ()), *context.args]):
        name, command, rest = command.resolve_command(context, left)
        context = command.make_context(name, list(rest), parent=context)
    settings = [word for word in words if SETTING.fullmatch(word) and not word.startswith("-")]
    named = [word for word in words if word.startswith("configs/") and (ROOT / word).exists()]
    if named:
        load_run(ROOT / named[0], [setting for setting in settings if not setting.endswith("=...")])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a clone is."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    return folder


@pytest.mark.parametrize("line", [*filter(runnable, ALL), *(f"retool data {words}" for words in OWN_DATA)])
def test_a_command_that_needs_no_machine_runs(line: str, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace)
    stdin = "It is \\boxed{4}." if " < " in line else None
    result = CliRunner().invoke(all_commands(), words_of(line), input=stdin)
    assert result.exit_code == 0, result.output[-2000:]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_the_settings_of_a_page_load(page: Path):
    """Each block together with the settings that every run needs."""
    for block in blocks(page, "toml"):
        tree = tomllib.loads((ROOT / "configs/rl_tiny_cpu.toml").read_text(encoding="utf-8"))
        for section, table in tomllib.loads(block).items():
            tree[section] = tree.get(section, {}) | table
        build_config(RlConfig, tree, page.name)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_the_python_of_a_page_prints_its_comments(page: Path):
    for block in blocks(page, "python"):
        if "asyncio.run" in block:  # it needs a server
            continue
        printed = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert printed, f"a block of {page.name} prints nothing that can be compared"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, page.name, "exec", dont_inherit=True), {"__name__": "page"})
        assert out.getvalue().splitlines() == printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_generated_parts_of_a_page_are_up_to_date(page: Path):
    """python -m tests.docs.record"""
    text = page.read_text(encoding="utf-8")
    if "<!-- made: mapping" in text and importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    assert filled(text) == text
