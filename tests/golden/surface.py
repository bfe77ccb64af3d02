"""What users have written down: the options of every command, and the keys of a configuration.

python -m tests.golden.surface     # records surface.json, which test_surface.py compares with
"""

import json
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig, SftConfig

RECORD = Path(__file__).with_name("surface.json")


def options(command: Any, name: str = "retool") -> dict[str, list[str]]:
    """Command -> its arguments and options, each with its default."""
    own = [
        f"{' '.join(one.opts + one.secondary_opts)} = {one.default!r}" for one in command.params if one.name != "help"
    ]
    found = {name: own}
    for key, each in sorted(getattr(command, "commands", {}).items()):
        found |= options(each, f"{name} {key}")
    return found


def keys(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Key -> its type and its default."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= keys(inner, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
            found[f"{prefix}{name}"] = f"{field.annotation} = {default}".replace("typing.", "")
    return found


def surface() -> dict[str, Any]:
    return {
        "commands": options(typer.main.get_command(all_commands())),
        "sft": keys(SftConfig),
        "rl": keys(RlConfig),
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
