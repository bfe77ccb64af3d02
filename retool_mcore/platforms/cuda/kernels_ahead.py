"""The kernels that SGLang compiles in its first CUDA graph, compiled from a run's first second on.

SGLang and FlashInfer hand these to nvcc one after the other, each when it is called for the first
time: 63 of the 94 s of an engine's first start on an H100 machine. Here they are compiled side by
side (44 s), by the same loaders, into the caches that the engine then reads. Triton's are not
among them: they are made from the tensors of a call.

What fails here is compiled by the engine.
"""

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from retool_mcore.config import RlConfig
from retool_mcore.model.files import read_config
from retool_mcore.model.shape import shape_of_config

SGLANG_KERNELS = "sglang.jit_kernel"
ARCH_ENV = "TVM_FFI_CUDA_ARCH_LIST"  # which SGLang sets for each compilation, and takes back after it
LEFT = "is left to the engine"
TOLD_S = 1.0


@dataclass(frozen=True)
class Kernel:
    """A kernel by the function that loads it, and compiles it where no cache has it."""

    loader: str
    arguments: tuple[Any, ...] = ()

    def load(self) -> str:
        """Returns how long it took, or why it failed."""
        began = time.monotonic()
        module, _, name = self.loader.rpartition(".")
        try:
            getattr(importlib.import_module(module), name)(*self.arguments)
        except Exception as error:  # noqa: BLE001  whatever it is, the engine meets it again and says more
            return f"{module} {LEFT} ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
        return f"{module} {time.monotonic() - began:.1f} s"


def kernels_of(config: RlConfig) -> Sequence[Kernel]:
    """Of a forward pass of Qwen2, Qwen3 or Llama in an engine of the run.

    None of a model that is still to be fetched.
    """
    model = read_config(config.model.path)
    if not model:
        return ()
    shape, dtype = shape_of_config(model), getattr(torch, config.model.dtype)
    cached = 1 if config.rollout.kv_cache == "fp8" else dtype.itemsize
    kv_heads = max(1, shape.kv_heads // config.rollout.engine_tp)
    kernels = [
        Kernel(f"{SGLANG_KERNELS}.rope._jit_fused_rope_module", (True, shape.head_dim, dtype)),
        Kernel(f"{SGLANG_KERNELS}.kvcache.can_use_store_cache", (kv_heads * shape.head_dim * cached,)),
        Kernel(f"{SGLANG_KERNELS}.activation._jit_activation_module", (dtype,)),
        Kernel(f"{SGLANG_KERNELS}.clamp_position._jit_clamp_position_module", (torch.int64,)),
    ]
    if str(model.get("model_type")).startswith("qwen3"):
        kernels.append(Kernel(f"{SGLANG_KERNELS}.norm.can_use_fused_inplace_qknorm", (shape.head_dim, dtype)))
    if importlib.util.find_spec("cutlass") is None:  # with its Python package FlashInfer's norm is no nvcc's
        kernels.insert(0, Kernel("flashinfer.norm.get_norm_module"))
    return kernels


def compile_kernels(kernels: Sequence[Kernel]) -> None:
    """Load all of them at the same time, in a process of its own.

    Prints a line if it took long or one of them failed.
    """
    began = time.monotonic()
    try:
        arch = importlib.import_module(f"{SGLANG_KERNELS}.utils").get_jit_cuda_arch()
    except Exception as error:  # noqa: BLE001  this SGLang has none of them, or cannot say for which device
        _tell(f"none is compiled ({type(error).__name__}: {error})")
        return
    os.environ[ARCH_ENV] = arch.target_name  # the same before, in and after each of the threads' compilations
    imported = time.monotonic()
    with ThreadPoolExecutor(len(kernels)) as threads:
        results = list(threads.map(Kernel.load, kernels))
    if time.monotonic() - imported > TOLD_S or any(LEFT in result for result in results):
        _tell(f"{', '.join(results)}; {time.monotonic() - began:.1f} s in all")


def _tell(words: str) -> None:
    sys.stdout.write(f"the engine's kernels ahead of it: {words}\n")
    sys.stdout.flush()
