"""The rooms of the house: which room may import which."""

import ast
import gc
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

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


@pytest.mark.parametrize(
    ("names", "tables"),
    [
        ({"cpu", "cuda", "npu", "ascend"}, {"config/shared.py", "planner/hardware.py"}),  # choices and data sheets
        ({"sglang", "vllm"}, {"run/environment.py", "quickstart.py"}),  # lists of packages
    ],
)
def test_only_platforms_ask_for_the_name_of_a_device_or_an_engine(names: set[str], tables: set[str]):
    """All else reads a platform's facts, or one of `platforms/rollout_engines.py`."""
    package = ROOT / "retool_mcore"
    assert not [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if "platforms" not in path.parts and str(path.relative_to(package)) not in tables
        for node in ast.walk(_tree(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
