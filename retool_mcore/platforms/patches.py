"""Changes made to other people's code at run time, as records: listed, version-checked, revertible,
deletable.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

from retool_mcore.errors import PlatformError

logger = logging.getLogger(__name__)

_originals: dict[str, Any] = {}  # target -> what stood there before; the patches applied in this process


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of a foreign module or class, and what replaces it.

    ``target`` is a dotted path to the attribute. ``replace`` makes the replacement from the
    original. ``applies_to`` is a requirement ("torch>=2.9,<2.14"); outside of it the patch refuses
    to apply.
    """

    target: str
    replace: Callable[[Any], Any]
    reason: str
    applies_to: str
    remove_when: str

    @property
    def applied(self) -> bool:
        return self.target in _originals

    def apply(self) -> None:
        """Replace the target in this process; the second call does nothing.

        Raises PlatformError when the target is gone or its package's version is out of range.
        """
        if self.applied:
            return
        self.check_version()
        owner, name = self._locate()
        original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        setattr(owner, name, self.replace(original))
        _originals[self.target] = original
        logger.info("patched %s: %s", self.target, self.reason)

    def revert(self) -> None:
        """Put the original back. For tests that show what happens without the patch."""
        owner, name = self._locate()
        setattr(owner, name, _originals.pop(self.target))

    def check_version(self) -> None:
        """Raise PlatformError unless the package is installed in a version that the patch was
        written for.
        """
        requirement = Requirement(self.applies_to)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise PlatformError(
                f"the patch of {self.target} needs {self.applies_to}, and {requirement.name} is not installed. "
                "Run `make install`."
            ) from error
        if not requirement.specifier.contains(version, prereleases=True):
            raise PlatformError(
                f"the patch of {self.target} was written for {self.applies_to}, and {requirement.name} {version} is "
                f"installed. Install a version in that range, or check whether the patch can go ({self.remove_when})."
            )

    def _locate(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's name."""
        path, _, name = self.target.rpartition(".")
        owner = _resolve(path)
        if owner is None or not hasattr(owner, name):
            raise PlatformError(
                f"the patch of {self.target} does not fit the installed {Requirement(self.applies_to).name}: there is "
                f"no such attribute any more. It was made because {self.reason}. Check whether it can go."
            )
        return owner, name


def _resolve(path: str) -> Any | None:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(str(error.name)):
                raise  # the module exists, and something it imports does not
            continue
        for part in parts[count:]:
            owner = getattr(owner, part, None)
            if owner is None:
                return None
        return owner
    return None


def apply_all(patches: Iterable[Patch]) -> None:
    for patch in patches:
        patch.apply()


class ModuleView(ModuleType):
    """A module seen from one foreign file with a few names replaced; all other names are the
    module's own.

    Set as the file's global (``some.module.torch``), it changes what that file sees and nothing
    else.
    """

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__, f"{module.__name__} with {', '.join(replaced)} replaced")
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
