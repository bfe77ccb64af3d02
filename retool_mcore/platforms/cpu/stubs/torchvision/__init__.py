"""Import stub in front of the real torchvision, for wheels that are linked against CUDA.

Their compiled part does not load under a CPU build of torch, and the first import then fails on two
operators which the compiled part would have defined. This module defines them and then runs the
real package; the Python parts that transformers and SGLang use work. A wheel whose compiled part
loads is left as it is.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_stubs = Path(__file__).resolve().parent.parent
_spec = PathFinder.find_spec("torchvision", [p for p in sys.path if Path(p or ".").resolve() != _stubs])
if _spec is None or _spec.origin is None:
    raise ModuleNotFoundError("No module named 'torchvision' behind its import stub", name="torchvision")
__file__ = _spec.origin
__path__ = [str(Path(__file__).parent)]
__spec__ = _spec
try:
    for _compiled in Path(__file__).parent.glob("_C*.so"):
        torch.ops.load_library(str(_compiled))
    torch.ops.torchvision.nms  # noqa: B018  raises when nothing defined it
except (OSError, AttributeError):
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
exec(compile(Path(__file__).read_text(encoding="utf-8"), __file__, "exec"), globals())
