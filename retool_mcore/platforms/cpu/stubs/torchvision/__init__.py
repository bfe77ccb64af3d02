"""Import stub: SGLang imports torchvision when it starts. transformers imports it if it is found.

The package index has only builds linked against CUDA. Text models do not call torchvision. Here
every submodule can be imported, every attribute exists, and calling one raises
NotImplementedError. Only a run's processes find this folder (PYTHONPATH); elsewhere the
environment has no torchvision.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__version__ = "0.28.0"


class _Missing(type):
    """Metaclass of a stub: attributes are stubs too, and a call raises NotImplementedError."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__}: platform cpu has no torchvision, and runs support only text models"
        )


def _missing(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__call__(_Missing, name, (), {"__module__": module})


class _Submodules(MetaPathFinder, Loader):
    """Finds any submodule of this one; each is empty and has every attribute."""

    def find_spec(self, fullname, path=None, target=None):
        below = fullname.startswith(f"{__name__}.")
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def exec_module(self, module):
        module.__getattr__ = lambda name: _missing(module.__name__, name)


def __getattr__(name):
    return _missing(__name__, name)


sys.meta_path.append(_Submodules())
