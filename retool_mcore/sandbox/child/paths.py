"""At landlock, redirect the names /tmp and /dev/shm to the execution's working directory.

With a mount namespace two links do this. Here Python's own functions that take a path do it; C code
that opens files by itself (sqlite3) is not redirected and gets PermissionError. This is a
convenience and protects nothing: Landlock refuses the real directories either way.
"""

import builtins
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

SHARED = ("/tmp", "/dev/shm")
_ONE_PATH = (
    "access", "chdir", "chmod", "listdir", "lstat", "mkdir", "open", "readlink", "remove", "rmdir", "scandir", "stat",
    "truncate", "unlink", "utime",
)  # fmt: skip
_TWO_PATHS = ("link", "rename", "replace", "symlink")
_KEYWORDS = ("path", "file", "src", "dst")
_SUPPORT = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")
_RAW = ("posix", "_io", "_frozen_importlib", "_frozen_importlib_external")  # what imports use

box = "."  # the execution's working directory; the zygote's child sets it


def redirect_shared_dirs(kept: Sequence[str]) -> None:
    """Replace the path functions in every loaded module, for the code and all later imports.

    Paths that begin with one of ``kept`` stay as they are: Python's own, where it lies under /tmp.
    """
    exempt = tuple(path for path in kept if path.startswith(tuple(f"{shared}/" for shared in SHARED)))
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
    """``function`` with its first ``num_paths`` arguments, which are paths, redirected."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        asked: dict[Any, Any] = {}  # redirected path -> the path that the code named
        paths = [_redirect(path, exempt, asked) for path in args[:num_paths]]
        for name in _KEYWORDS:
            if name in kwargs:
                kwargs[name] = _redirect(kwargs[name], exempt, asked)
        if not asked:
            return function(*args, **kwargs)
        try:
            return function(*paths, *args[num_paths:], **kwargs)
        except OSError as error:
            for attribute in ("filename", "filename2"):
                if getattr(error, attribute) in asked:
                    setattr(error, attribute, asked[getattr(error, attribute)])
            raise

    call.__module__ = "io" if function is io.open else "os"
    return call


def _redirect(path: Any, exempt: tuple[str, ...], asked: dict[Any, Any]) -> Any:
    name: Any = path.__fspath__() if hasattr(path, "__fspath__") else path
    if not isinstance(name, str) or not name.startswith(SHARED):
        return path
    for shared in SHARED:
        beneath = name[len(shared) :]
        if name.startswith(shared) and beneath[:1] in ("", "/") and not name.startswith((box, *exempt)):
            asked[box + beneath] = name
            return box + beneath
    return path
