"""Imports the user's objects that a setting names as "module:name"."""

import importlib
import os
import sys
from typing import Any

from retool_mcore.errors import ConfigError


def import_object(setting: str, path: str) -> Any:
    """Import the object that ``setting`` names, such as "my_package.module:name".

    Searches Python's path and the current folder. Raises ConfigError if the module or the name does
    not exist, or if the import fails.
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
                f'{setting} = "{path}": module {module_name} imports {error.name}, which is not installed for '
                f"{sys.executable}. Install it."
            ) from error
        raise ConfigError(
            f'{setting} = "{path}": no module {error.name} in {os.getcwd()} or among the packages of '
            f"{sys.executable}. On every node, start the run in the folder of the module, install it (pip install "
            "-e .), or add its folder to PYTHONPATH."
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f'{setting} = "{path}": importing {module_name} raised {type(error).__name__}: {error}'
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f'{setting} = "{path}": {module.__file__} has no name {name}.')
    return getattr(module, name)
