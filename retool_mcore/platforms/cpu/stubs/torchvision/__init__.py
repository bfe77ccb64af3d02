"""Import stub: SGLang imports torchvision by name at start, and transformers wherever it is found.

The index has only builds linked against CUDA. Models of text call none of it: every module imports,
every name of a module is there, and calling one raises NotImplementedError. Only a run's processes
find this folder (PYTHONPATH); elsewhere the environment has no torchvision.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__version__ = "0.28.0"


class _Missing(type):
    """The class of a name: attributes lead on, a call says what is missing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__}: platform cpu has no torchvision, and a run has models of text only"
        )


def _missing(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__call__(_Missing, name, (), {"__module__": module})


class _Submodules(MetaPathFinder, Loader):
    """Finds any module below this one; each is empty, and has every name."""

    def find_spec(self, fullname, path=None, target=None):
        below = fullname.startswith(f"{__name__}.")
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def exec_module(self, module):
        module.__getattr__ = lambda name: _missing(module.__name__, name)


def __getattr__(name):
    return _missing(__name__, name)


sys.meta_path.append(_Submodules())
