"""A stand-in for torch_npu: PyTorch's PrivateUse1 backend under the name "npu", and a torch.npu of
few functions.

It answers what an adapter may ask before any kernel runs. Every other name raises, with the name,
so a call that a test does not expect cannot pass for an answer.
"""

import sys
import types

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

ANSWERS = {
    "is_available": True,
    "device_count": 8,
    "current_device": 0,
    "_is_in_bad_fork": False,  # what PyTorch itself asks of a registered device module
    "is_initialized": False,
    "get_device_name": "Ascend910B3",
    "get_device_capability": None,
}


def __getattr__(name: str):
    """Kernels (npu_fusion_attention and its like): transformers imports them by name, nobody may
    call one.
    """
    if not name.startswith("npu_"):
        raise AttributeError(f"module torch_npu has no attribute {name}")

    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError(f"torch_npu.{name} is a kernel, and there is no NPU")

    return kernel


class _Npu(types.ModuleType):
    mstx = types.SimpleNamespace()  # the profiler's marks, which verl imports by name

    def __getattr__(self, name: str):
        if name in ANSWERS:
            return lambda *_, **__: ANSWERS[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"torch.npu.{name} is a call the adapter must not make before a run starts")


_npu = _Npu("torch.npu")
sys.modules["torch_npu.npu"] = _npu
rename_privateuse1_backend("npu")
torch._register_device_module("npu", _npu)
