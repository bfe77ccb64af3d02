"""Each private name of other libraries that our code uses is recorded and unchanged."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from retool_mcore import verl as room
from retool_mcore.errors import PlatformError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.patches import Seam
from retool_mcore.verl.private_names import SEAMS

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
ALL = (*SEAMS, *get_platform("cpu").seams(), *get_platform("cuda").seams())


@pytest.mark.parametrize("seam", ALL, ids=lambda seam: seam.title)
def test_each_private_name_exists_with_its_recorded_parameters(seam: Seam):
    seam.check_version()
    seam.check_signature()


def overridden() -> Iterator[str]:
    """The private names of another package's nearest class that classes of verl/ define anew."""
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        for made in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(made) or made.__module__ != module.name:
                continue
            ours = [base for base in made.__mro__ if base.__module__.startswith("retool_mcore")]
            theirs = [base for base in made.__mro__ if base not in ours]
            for name in {
                name
                for base in ours
                for name in vars(base)
                if name[0] == "_" and name[:2] != "__" and name != "_abc_impl"
            }:
                for base in theirs:
                    if name in vars(base) and base.__module__ not in ("typing", "abc"):
                        yield f"{base.__module__}.{base.__qualname__}.{name}"
                        break


def test_no_override_of_a_private_method_is_missing():
    found = set(overridden())
    assert len(found) > 5, "the search finds nothing any more"
    assert not found - {target for seam in SEAMS for target in seam.targets}


def seam(target: str, *parameters: str, applies_to: str = "pydantic>=2") -> Seam:
    texts = {"reason": "a test asks for it", "remove_when": "the test goes"}
    return Seam(targets=(target,), parameters=parameters, applies_to=applies_to, **texts)


def test_a_private_name_that_moved_or_changed_is_an_error():
    seam("json.JSONDecoder.raw_decode", "self", "s", "idx").check_signature()
    with pytest.raises(PlatformError, match="parameters self, text, but the installed ones are self, s, idx"):
        seam("json.JSONDecoder.raw_decode", "self", "text").check_signature()
    with pytest.raises(PlatformError, match=r"seam of json\.JSONDecoder\._gone does not fit the installed pydantic"):
        seam("json.JSONDecoder._gone", "self").check_signature()
    with pytest.raises(PlatformError, match=r"seam of json\.JSONDecoder\.raw_decode was written for pydantic<1"):
        seam("json.JSONDecoder.raw_decode", "self", applies_to="pydantic<1").check_version()
