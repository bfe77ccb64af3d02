"""Records of our dependencies on internals of other packages: patches and seams.

Each record checks the version of its package and says when it can be removed. patches_verl.py,
patches_megatron.py, patches_bridge.py, patches_sglang.py and patches_torch.py contain the patches
of one library each. cpu/patches.py and cuda/patches.py contain those that no other platform needs.
"""

import importlib.metadata
import inspect
import logging
import pydoc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

from retool_mcore.errors import PlatformError

logger = logging.getLogger(__name__)

# The versions that this code was checked against. The extras of pyproject.toml allow no others.
VERSIONS = {
    "torch": ">=2.9,<2.14",
    "megatron-core": ">=0.18,<0.19",  # on Ascend 0.18.0, elsewhere 0.18.2
    "megatron-bridge": ">=0.5,<0.5.3",  # on Ascend 0.5.0, elsewhere 0.5.1; verl's index of wheels has a 0.5.2
    "transformer-engine": ">=2.11,<2.12",  # 2.13 needs cuBLAS 13.2, torch 2.11 has 13.1; 2.12 is untested
    "verl": "==0.9.1",
    "sglang": "==0.5.14",
    "ray": "==2.60.0",
}

_originals: dict[str, Any] = {}  # target -> original attribute, for each change made in this process


def requirement(package: str) -> str:
    """The package with its version range, as a pip requirement."""
    return package + VERSIONS[package]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dependency on another package beyond its public API.

    ``applies_to``: a pip requirement such as "torch>=2.9,<2.14". ``remove_when``: the change
    upstream that makes the record unnecessary.
    """

    reason: str
    applies_to: str
    remove_when: str

    @property
    def title(self) -> str:
        """The name that the record depends on, for messages."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    def check_version(self) -> None:
        """Raise PlatformError unless the installed version of the package is in the range."""
        requirement = Requirement(self.applies_to)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise PlatformError(
                f"the {self.kind} of {self.title} needs {self.applies_to}, but {requirement.name} is not installed. "
                "Run `make install`."
            ) from error
        if not requirement.specifier.contains(version, prereleases=True):
            raise PlatformError(
                f"the {self.kind} of {self.title} was written for {self.applies_to}, but {requirement.name} {version} "
                f"is installed. Install a version in that range, or check whether the {self.kind} can be removed "
                f"({self.remove_when})."
            )

    def locate(self, target: str) -> tuple[Any, str]:
        """The target's owner and attribute name. Raises PlatformError if it does not exist."""
        path, _, name = target.rpartition(".")
        owner: Any = pydoc.locate(path)  # imports the module
        if owner is None or not hasattr(owner, name):
            raise PlatformError(
                f"the {self.kind} of {target} does not fit the installed {Requirement(self.applies_to).name}, which no "
                f"longer has that attribute. The {self.kind} exists because {self.reason}. Check whether it can be "
                "removed."
            )
        return owner, name

    def check_parameters(self, target: str, parameters: tuple[str, ...] | None) -> None:
        """Raise PlatformError if the target does not exist or its parameters differ.

        ``parameters``: the expected names; None if the target is not a Python function.
        """
        owner, name = self.locate(target)
        if parameters is None:
            return
        installed = tuple(inspect.signature(getattr(owner, name)).parameters)
        if installed != parameters:
            raise PlatformError(
                f"the {self.kind} of {target} was written for the parameters {', '.join(parameters)}, but the "
                f"installed ones are {', '.join(installed)}. The {self.kind} exists because {self.reason}. Adapt it to "
                "the change."
            )


@dataclass(frozen=True)
class Change:
    """An attribute that a patch replaces by ``replace(original)``.

    ``target``: dotted path of an attribute of a module or class. ``parameters``: the parameter
    names that the patch was written for; None if the target is not a Python function.
    """

    target: str
    parameters: tuple[str, ...] | None
    replace: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Patch(Record):
    """Replaces attributes of another package for one reason.

    ``gain``: what the patch improves, or which wrong result it prevents, with a figure if measured.
    ``upstream``: URL of the issue or pull request, if there is one.
    """

    changes: tuple[Change, ...]
    gain: str
    upstream: str = ""

    @property
    def title(self) -> str:
        return _title([change.target for change in self.changes])

    def __str__(self) -> str:
        upstream = f" ({self.upstream})" if self.upstream else ""
        return f"{self.title}: {self.reason}. {self.gain}. Remove when {self.remove_when}{upstream}"

    @property
    def applied(self) -> bool:
        return all(change.target in _originals for change in self.changes)

    def apply(self) -> None:
        """Replace the targets in this process; further calls do nothing.

        Raises PlatformError if a target does not exist or has different parameters, or if the
        package's version is out of range.
        """
        waiting = [change for change in self.changes if change.target not in _originals]
        if not waiting:
            return
        self.check_version()
        for change in waiting:
            self.check_parameters(change.target, change.parameters)
        for change in waiting:
            owner, name = self.locate(change.target)
            original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
            setattr(owner, name, change.replace(original))
            _originals[change.target] = original
            logger.info("patched %s: %s", change.target, self.reason)

    def revert(self, *targets: str) -> None:
        """Restore the originals of ``targets``, or of all targets if none is given.

        For tests of the behaviour without the patch.
        """
        for target in targets or [change.target for change in self.changes]:
            owner, name = self.locate(target)
            setattr(owner, name, _originals.pop(target))


@dataclass(frozen=True, kw_only=True)
class Seam(Record):
    """A private name that our code overrides, calls or sets, without patching it.

    ``targets``: one or more names that we use for one reason, all with the same ``parameters``,
    as in ``Change``. Tests compare the parameters with those of the installed package, so that they
    fail before a run does if a new version changes them.
    """

    targets: tuple[str, ...]
    parameters: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        return _title(self.targets)

    def __str__(self) -> str:
        return f"{self.title}: {self.reason}. Remove when {self.remove_when}"

    def check_signature(self) -> None:
        """Import the targets. Raises PlatformError if one is missing or its parameters differ."""
        for target in self.targets:
            self.check_parameters(target, self.parameters)


def _title(targets: Sequence[str]) -> str:
    first, *more = targets
    return f"{first} and {len(more)} more" if more else first


def apply_all(patches: Iterable[Patch]) -> None:
    for patch in patches:
        patch.apply()


class ModuleView(ModuleType):
    """A module with a few names replaced; all other names are those of the original module.

    Set it as a global of another package's file (``some.module.torch``), to change the names for
    that file only.
    """

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__, f"{module.__name__} with {', '.join(replaced)} replaced")
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
