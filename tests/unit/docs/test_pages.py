"""The pages: their commands run, or are read as far as this machine goes; their settings load;
their Python prints the shown output; their generated parts are up to date.
"""

import contextlib
import importlib.util
import io
import itertools
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
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Pages that the site includes or links to, whose commands users take as well.
GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
GUIDES += [ROOT / folder / "README.md" for folder in ("launch", "ascend", "configs")]
# Commands that other machines have. What stands before them is read by `bash -n`.
ELSEWHERE = ("sbatch", "kubectl", "sky", "tensorboard", "source", "docker", "apptainer", "git", "head", "uv")
STARTS = "|".join(("retool", "bash", "make", "python", "torchrun", r"\.venv/bin/\w+", *ELSEWHERE))
INDENTED = re.compile(rf"^ {{4,6}}(?:[A-Z_]+=\S+ )*(?:{STARTS}) (?:.*\\\n)*.*\n", re.MULTILINE)
# Indented lines that no shell runs, by a part of the first, and why.
NO_COMMANDS = {
    "problem ──> model writes code": "a drawing",
    "git clone <this repository>": "the address is the reader's",
    "def test_min_lr_needs": "Python of CONTRIBUTING's first change",
    "if self.min_lr and": "the same",
    "rollout.protocol =": "a setting whose module is the reader's",
    "from retool_mcore.": "Python of the reader's own package; tests/unit/rollout and tests/unit/reward run its like",
}
SETTING = re.compile(r"[a-z_]+\.[a-z_0-9.]+=.*", re.DOTALL)
# Of other machines, or with tests of their own.
SLOW = (
    "data task",
    "data fetch",
    "data sft",
    "data protocol",
    "data model",
    "sandbox serve",
    "eval",
    "score",
    "quickstart",
)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCED.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[str]:
    """Every line of a page that a shell would run; lines that end in a backslash are joined."""
    text = page.read_text(encoding="utf-8")
    found = blocks(page, "bash") + INDENTED.findall(FENCED.sub("", text))
    lines = "".join(found).replace("\\\n", " ").splitlines()
    kept = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return [line for line in kept if not any(part in line for part in NO_COMMANDS)]


def words_of(line: str) -> list[str]:
    """The words of a command without its comment, redirections and variables of the environment."""
    words = shlex.split(line.partition(" < ")[0], comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


ALL = [(str(page.relative_to(ROOT)), line) for page in [*PAGES, *GUIDES] for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), [pair for pair in ALL if words_of(pair[1])[:1] == ["retool"]])
def test_a_command_has_the_options_and_settings_that_the_page_gives(page: str, line: str):
    """As click and the configuration read them; nothing runs."""
    command: Any = typer.main.get_command(all_commands())
    words = words_of(line)[1:]
    context = command.make_context("retool", words, resilient_parsing=False)
    # What a group has not read is in both: its command's name is protected.
    while hasattr(command, "commands") and (left := [*getattr(context, "_protected_args", ()), *context.args]):
        name, command, rest = command.resolve_command(context, left)
        context = command.make_context(name, list(rest), parent=context)
    settings = [word for word in words if SETTING.fullmatch(word) and not word.startswith("-")]
    named = [word for word in words if word.startswith("configs/") and (ROOT / word).exists()]
    if named:
        load_run(ROOT / named[0], [setting for setting in settings if not setting.endswith("=...")])


@pytest.mark.parametrize(("page", "line"), [pair for pair in ALL if words_of(pair[1])[:1] not in (["retool"], [])])
def test_what_another_command_names_is_there(page: str, line: str):
    words = words_of(line)
    if words[0] in ELSEWHERE or words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[0] != "make" or words[1] in targets, f"make {words[1]}"
    files = [word for word in words if re.fullmatch(r"(?:launch|ascend|configs|perf|tests)/[\w./-]+", word)]
    assert all((ROOT / file).exists() for file in files), line
    modules = [word for before, word in itertools.pairwise(words) if before == "-m" and "." in word]
    assert all(module.startswith("sglang") or importlib.util.find_spec(module) for module in modules), line
    if any(word.endswith(("launch/sft_mcore.py", "launch/rl.py")) for word in words):
        [named] = [word for word in files if word.startswith("configs/")]
        load_run(ROOT / named, [word for word in words if SETTING.fullmatch(word)])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a clone is."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "tests", "perf", "launch", "ascend"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    (folder / "turn.txt").write_text("It is \\boxed{4}.", encoding="utf-8")
    return folder


def runnable(line: str) -> bool:
    words = words_of(line)
    name = " ".join(words[1:3])
    here = words[0] == "retool" and words[1] in ("plan", "config", "get", "parse", "data")
    absent = ("two_tools", "my_", "--like", "data/", "CONFIG", "[", "run.sh", "FILE", "DIR", "SOURCE")
    return here and not name.startswith(SLOW) and not any(part in line for part in absent)


HERE = [pair for pair in ALL if runnable(pair[1])] + [
    ("docs/data.md", "retool data rl tests/data/samples/gsm8k_60.jsonl --out data/mine.parquet"),
    ("docs/data.md", "retool data lint data/mine.parquet"),
]


@pytest.mark.parametrize("line", list(dict.fromkeys(line for _, line in HERE)))
def test_a_command_that_needs_no_machine_runs(line: str, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace)
    stdin = (workplace / "turn.txt").read_text(encoding="utf-8") if " < " in line else None
    result = CliRunner().invoke(all_commands(), words_of(line)[1:], input=stdin)
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
        if "asyncio.run" in block:  # test_serving.py runs the file that it is made of
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


NAME = re.compile(r"`([a-z_]+\.[a-z_0-9]+)(?: = ([^`]*))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_setting_that_a_page_names_is_one(page: Path):
    """A name like `train.steps`, unless it is of a file."""
    known = {
        f"{section}.{name}": field
        for section, part in RlConfig.model_fields.items()
        for name, field in getattr(part.annotation, "model_fields", {}).items()
    }
    sft = {"train.global_batch", "data.max_length_tokens"}
    theirs = {"data.max_length", "data.train_batch_size", "data.max_token_len_per_gpu"}  # verl's
    text = page.read_text(encoding="utf-8").split("<!-- made: mapping")[0]
    found = {name for name, _ in NAME.findall(text) if name.split(".")[0] in RlConfig.model_fields}
    endings = (".py", ".md", ".toml", ".sh", ".json")
    assert not {name for name in found if not name.endswith(endings)} - known.keys() - sft - theirs


DRY = [line for _, line in ALL if re.match(r"retool (?:rl|sft) configs/(?!mine).* --dry-run$", line)]


@pytest.mark.parametrize("line", list(dict.fromkeys(DRY)))
def test_a_dry_run_of_a_page_is_one(line: str, monkeypatch: pytest.MonkeyPatch):
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(all_commands(), shlex.split(line)[1:])
    assert result.exit_code == 0, result.output[-2000:]
    assert "Nothing was started" in result.output
