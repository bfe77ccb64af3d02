"""The rooms of the house: which room may import which."""

import ast
import gc
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def test_no_files_import_each_other_in_a_circle():
    graph = grimp.build_graph("retool_mcore", "ascend", cache_dir=None)
    list(
        TopologicalSorter(
            {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
        ).static_order()
    )


def _tree(source: str) -> ast.AST:
    """Parse without a garbage collection in between.

    One that runs Python code which parses makes ast.parse fail up to Python 3.11.7 (CPython
    106905).
    """
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def test_a_name_of_a_class_means_one_thing_in_the_package():
    named = Counter(
        node.name
        for path in (ROOT / "retool_mcore").rglob("*.py")
        for node in _tree(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in named.items() if times > 1] == []


GUIDES = [*ROOT.glob("*.md"), ROOT / "launch" / "README.md", *(ROOT / "retool_mcore").rglob("README.md")]


def test_files_that_the_guides_name_are_there():
    """Paths start at the root, the package or the guide's folder.

    A lone name in backticks is of the guide's folder.
    """
    missing: list[str] = []
    for guide in GUIDES:
        text = guide.read_text(encoding="utf-8")
        named = set(re.findall(r"\b(?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|sh|toml)\b", text))
        if guide.parent != ROOT:
            named |= set(re.findall(r"`([a-z_0-9]+\.py)`", text))
        files = {name for name in named if not name.startswith("runs/")}
        folders = (ROOT, ROOT / "retool_mcore", guide.parent)
        missing += [
            f"{guide.name}: {name}" for name in files if not any((folder / name).exists() for folder in folders)
        ]
    assert not missing


def _named_outside_platforms(names: set[str], tables: set[str]) -> list[str]:
    """Where the package has one of ``names`` as a literal, but for platforms/ and ``tables``."""
    package = ROOT / "retool_mcore"
    return [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if "platforms" not in path.parts and str(path.relative_to(package)) not in tables
        for node in ast.walk(_tree(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]


def test_only_platforms_ask_for_the_name_of_a_device():
    """All else reads a platform's facts. The schema names the choices, the planner's table the data
    sheets.
    """
    tables = {"config/shared.py", "planner/hardware.py"}
    assert not _named_outside_platforms({"cpu", "cuda", "npu", "ascend"}, tables)


def test_only_platforms_ask_for_the_name_of_a_rollout_engine():
    """All else reads a fact of `platforms/rollout_engines.py`. The tables list packages."""
    assert not _named_outside_platforms({"sglang", "vllm"}, {"run/environment.py", "quickstart.py"})
