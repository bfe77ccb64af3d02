"""Where our code depends on the insides of other people's: patches and seams, as listed records.

Each record checks its package's version and says when it can be deleted.
"""

import importlib
import importlib.metadata
import inspect
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
class Record:
    """A place in other people's code that ours depends on, beyond what that code offers to callers.

    ``target`` is a dotted path to an attribute of a module or class. ``applies_to`` is a
    requirement ("torch>=2.9,<2.14"), see versions.py. ``remove_when`` says what would make the
    record unnecessary.
    """

    target: str
    reason: str
    applies_to: str
    remove_when: str

    def check_version(self) -> None:
        """Raise PlatformError unless the package is installed in a version of the range."""
        requirement = Requirement(self.applies_to)
        kind = type(self).__name__.lower()
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise PlatformError(
                f"the {kind} of {self.target} needs {self.applies_to}, and {requirement.name} is not installed. "
                "Run `make install`."
            ) from error
        if not requirement.specifier.contains(version, prereleases=True):
            raise PlatformError(
                f"the {kind} of {self.target} was written for {self.applies_to}, and {requirement.name} {version} is "
                f"installed. Install a version in that range, or check whether the {kind} can go ({self.remove_when})."
            )

    def locate(self) -> tuple[Any, str]:
        """The object that holds the target, and its name. Raises PlatformError when it is gone."""
        path, _, name = self.target.rpartition(".")
        owner = _resolve(path)
        if owner is None or not hasattr(owner, name):
            raise PlatformError(
                f"the {type(self).__name__.lower()} of {self.target} does not fit the installed "
                f"{Requirement(self.applies_to).name}: there is no such attribute any more. It was made because "
                f"{self.reason}. Check whether it can go."
            )
        return owner, name


@dataclass(frozen=True, kw_only=True)
class Patch(Record):
    """One attribute of a foreign module or class is replaced by what ``replace`` makes of it."""

    replace: Callable[[Any], Any]

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
        owner, name = self.locate()
        original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        setattr(owner, name, self.replace(original))
        _originals[self.target] = original
        logger.info("patched %s: %s", self.target, self.reason)

    def revert(self) -> None:
        """Put the original back. For tests that show what happens without the patch."""
        owner, name = self.locate()
        setattr(owner, name, _originals.pop(self.target))


@dataclass(frozen=True, kw_only=True)
class Seam(Record):
    """A private name that our code overrides, calls or sets, without replacing it for others.

    ``parameters``: the names in its signature, None for what is no function. Tests compare them
    with the installed package's, so a new version that changes one is noticed before a run is.
    """

    parameters: tuple[str, ...] | None = None

    def check_signature(self) -> None:
        """Import the target. Raises PlatformError when it is gone or its parameters differ."""
        owner, name = self.locate()
        if self.parameters is None:
            return
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found != self.parameters:
            raise PlatformError(
                f"the seam at {self.target} takes {', '.join(found)}, and was read with {', '.join(self.parameters)}. "
                f"It is held because {self.reason}. Read what changed."
            )


def _resolve(path: str) -> Any | None:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(str(error.name)):
                raise  # the module exists, but something that it imports does not
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
    """A module as one foreign file sees it: a few names are replaced, all others are the module's.

    Set it as the file's global (``some.module.torch``); it changes what that file sees and nothing
    else.
    """

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__, f"{module.__name__} with {', '.join(replaced)} replaced")
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
