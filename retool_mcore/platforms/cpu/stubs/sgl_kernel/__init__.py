"""Import stub: SGLang imports its CUDA kernels by name when it starts.

SGLang's plain PyTorch layers do not call them.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA, but this process runs on a CPU")

    missing.__name__ = name
    return missing
