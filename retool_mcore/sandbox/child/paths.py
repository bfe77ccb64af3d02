"""At level landlock, redirect /tmp and /dev/shm to the execution's working directory.

At level namespaces, two symbolic links in the mount namespace do this. At level landlock, this
module wraps Python's path functions instead. C code that opens files directly (sqlite3) bypasses
the wrappers and gets PermissionError. This is a convenience, not a protection: Landlock denies
access to the real directories either way.
"""

import builtins
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

_SHARED = re.compile(r"(/tmp|/dev/shm)(?=/|\Z)")
_ONE_PATH = (
    "access", "chdir", "chmod", "listdir", "lstat", "mkdir", "open", "readlink", "remove", "rmdir", "scandir", "stat",
    "truncate", "unlink", "utime",
)  # fmt: skip
_TWO_PATHS = ("link", "rename", "replace", "symlink")
_KEYWORDS = ("path", "file", "src", "dst")
_SUPPORT = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")
_RAW = ("posix", "_io", "_frozen_importlib", "_frozen_importlib_external")  # used by imports: left alone

box = "."  # the execution's working directory, set in the zygote's child


def redirect_shared_dirs(kept: Sequence[str]) -> None:
    """Wrap the path functions in every loaded module, for model code and for later imports.

    Paths that start with one of ``kept`` are not redirected: Python itself may be installed under
    /tmp.
    """
    exempt = tuple(path for path in kept if _SHARED.match(path))
    redirected = {name: _redirecting(getattr(os, name), 1, exempt) for name in _ONE_PATH}
    redirected |= {name: _redirecting(getattr(os, name), 2, exempt) for name in _TWO_PATHS}
    replaced: dict[int, Callable[..., Any]] = {id(io.open): _redirecting(builtins.open, 1, exempt)}
    replaced |= {id(getattr(os, name)): function for name, function in redirected.items()}
    for support in (getattr(os, name) for name in _SUPPORT):
        support |= {replaced[id(function)] for function in support if id(function) in replaced}
    for name, module in list(sys.modules.items()):
        if name not in _RAW and not name.startswith(("importlib", "retool_mcore")):
            for attribute, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, attribute, replaced[id(value)])


def _redirecting(function: Any, num_paths: int, exempt: tuple[str, ...]) -> Callable[..., Any]:
    """Wrap ``function`` to redirect its first ``num_paths`` arguments, which are paths."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        original: dict[Any, Any] = {}  # redirected path -> path that the code passed
        paths = [_redirect(path, exempt, original) for path in args[:num_paths]]
        for name in _KEYWORDS:
            if name in kwargs:
                kwargs[name] = _redirect(kwargs[name], exempt, original)
        if not original:
            return function(*args, **kwargs)
        try:
            return function(*paths, *args[num_paths:], **kwargs)
        except OSError as error:
            for attribute in ("filename", "filename2"):
                if getattr(error, attribute) in original:
                    setattr(error, attribute, original[getattr(error, attribute)])
            raise

    call.__module__ = "io" if function is io.open else "os"
    return call


def _redirect(path: Any, exempt: tuple[str, ...], original: dict[Any, Any]) -> Any:
    name: Any = path.__fspath__() if hasattr(path, "__fspath__") else path
    shared = _SHARED.match(name) if isinstance(name, str) else None
    if shared is None or name.startswith((box, *exempt)):
        return path
    redirected = box + name[shared.end() :]
    original[redirected] = name
    return redirected
