"""Builds the distribution of this folder, which has a name and a version but no module.

This is a separate PEP 517 build backend, so that `make install` downloads no backend for it and
leaves no build folder in the checkout.
"""

import tomllib
from pathlib import Path
from zipfile import ZipFile

_PROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):  # PEP 517 names them
    stem = f"{_PROJECT['name']}-{_PROJECT['version']}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {_PROJECT['name']}\nVersion: {_PROJECT['version']}\nSummary: {_PROJECT['description']}\n"
        f"Requires-Python: {_PROJECT['requires-python']}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: retool_mcore\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    wheel = f"{stem}-py3-none-any.whl"
    with ZipFile(Path(wheel_directory) / wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel
