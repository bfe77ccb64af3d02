"""The rooms of the house: who may import whom, and how large a room may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for p in ROOT.rglob("*.py") if not {".venv", "build", "runs"} & set(p.relative_to(ROOT).parts))

# A room may import from its own level's list and from everything further down. A room's own cli.py stands at the
# door of the house and may import anything.
LEVELS = [
    ("cli", "quickstart", "__main__"),
    ("train", "evaluate", "preflight", "planner"),
    (
        "verl_config",
        "verl_config_sft",
        "verl_config_rollout",
        "verl_config_refused",
        "rollout",
        "reward",
        "models",
        "activations",
    ),
    ("data", "sandbox"),
    (
        *("config", "config_checkpoint", "config_rl", "config_base", "config_errors"),
        *("platforms", "run_file", "verl_plugin"),
    ),
    ("errors", "process"),
]
LEVEL_OF = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
# data.build runs code in the sandbox, and checks answers with the reward's equivalence.
ALLOWED_UPWARD = {("data", "reward")}

ENGINE_ROOMS = {
    "verl": (
        *("verl_config", "verl_plugin", "train", "platforms", "quickstart"),
        *("rollout.agent_loop", "rollout.replay", "rollout.dataset", "rollout.router"),
    ),
    "megatron": ("train.engine", "train.checkpoint", "platforms"),
    "mbridge": ("train.engine", "train.checkpoint", "platforms"),
}
TORCH_FREE = ("errors", "config", "sandbox", "reward", "rollout.tool_call", "rollout.ledger")

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_modules() -> list[tuple[str, Path]]:
    package = ROOT / "retool_mcore"
    return [(".".join(p.relative_to(package).with_suffix("").parts), p) for p in SOURCES if p.is_relative_to(package)]


@pytest.mark.parametrize(("module", "path"), package_modules(), ids=lambda value: str(value)[-60:])
def test_imports_point_down_the_house(module: str, path: Path):
    room = module.partition(".")[0]
    if room == "__init__" or module.endswith(".cli"):
        return
    for name in imports_of(path):
        if not name.startswith("retool_mcore."):
            assert not name.startswith(("launch", "ascend", "perf")), f"{module} imports {name}"
            continue
        other = name.split(".")[1]
        if other == room or other not in LEVEL_OF or (room, other) in ALLOWED_UPWARD:
            continue
        assert LEVEL_OF[other] >= LEVEL_OF[room], f"{module} imports {name}, which is above it"


@pytest.mark.parametrize(("module", "path"), package_modules(), ids=lambda value: str(value)[-60:])
def test_engines_are_imported_only_where_they_are_driven(module: str, path: Path):
    for name in imports_of(path):
        top = name.partition(".")[0]
        if top in ENGINE_ROOMS:
            assert module.startswith(ENGINE_ROOMS[top]), f"{module} imports {name}"
        if top in ("torch", "transformers"):
            assert not module.startswith(TORCH_FREE), f"{module} imports {name}"


def test_pure_rooms_import_in_a_moment_and_without_torch():
    code = (
        "import sys; import retool_mcore.config, retool_mcore.cli, retool_mcore.sandbox.base; "
        "heavy = {'torch', 'verl', 'ray', 'transformers', 'megatron'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path):
    name = str(path.relative_to(ROOT))
    text = path.read_text(encoding="utf-8")
    assert name in LONG_FILES or text.count("\n") <= 400, f"{name} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert f"{name}::{node.name}" in LONG_FUNCTIONS or length <= 60, f"{name}::{node.name} has {length} lines"


def test_no_machine_leaks_into_the_repository():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = ["/" + "work/", "/" + "root/", "bash_" + "jobs"]
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".parquet", ".png"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not [word for word in words if word in text], name
