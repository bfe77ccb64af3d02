"""User objects that a setting names as "module:name"."""

import importlib
import os
import sys
from typing import Any

from retool_mcore.errors import ConfigError


def load_named(setting: str, path: str) -> Any:
    """The object that ``setting`` names by ``path``, "my_package.module:name".

    Searches Python's path and the folder in which the run starts. Raises ConfigError if there is no
    such module or name, or if the module fails to import.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f'{setting} = "{path}" is not of the form "module:name", as in "my_package.rewards:score".')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f'{setting} = "{path}": module {module_name} imports {error.name}, which is not installed in '
                f"{sys.executable}."
            ) from error
        raise ConfigError(
            f'{setting} = "{path}": there is no module {error.name} in {os.getcwd()}, nor among the packages of '
            f"{sys.executable}. Start the run in the folder that has it, install it (pip install -e .), or add its "
            "folder to PYTHONPATH, on every node."
        ) from error
    except Exception as error:  # the user's own code, whatever it does
        raise ConfigError(
            f'{setting} = "{path}": importing {module_name} fails with {type(error).__name__}: {error}'
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f'{setting} = "{path}": {module.__file__} has no name {name}.')
    return getattr(module, name)
