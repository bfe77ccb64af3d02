"""Turns a TOML file and command-line overrides into a validated configuration."""

import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from retool_mcore.config.base import is_table
from retool_mcore.config.evaluation import EvaluationConfig
from retool_mcore.config.explain import explain
from retool_mcore.config.rl import RlConfig
from retool_mcore.config.sft import SftConfig
from retool_mcore.config.shared import JobConfig
from retool_mcore.errors import ConfigError

PYTHON_WORDS = {"True": "Write true.", "False": "Write false.", "None": "Leave the setting out instead."}


def load_config[T: JobConfig](kind: type[T], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> T:
    """Read a TOML run file, apply ``section.key=value`` overrides and validate it.

    The values of overrides are TOML (``train.steps=5``, ``sandbox.where=["local"]``); bare words
    are strings. Raises ConfigError naming the file, the key, the value and the rule.
    """
    tree = _read(path)
    _require_kind(kind, tree, path)
    return build_config(kind, tree, str(path), overrides)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a run file. Raises ConfigError."""
    content = b""
    try:
        content = Path(path).read_bytes()
        return tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}{_suggestion(Path(path))}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {_kind_of_file(Path(path), content) or error}") from error


def _kind_of_file(path: Path, content: bytes) -> str:
    """What a file that is not TOML seems to be, and what to do; "" if unknown."""
    run_file = "A run file has sections like [train] with lines like steps = 10: see configs/rl_tiny_cpu.toml."
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16. Save it as UTF-8."
    if b"\0" in content:
        return f"it is a binary file. {run_file}"
    if content.lstrip().startswith((b"{", b"[{")):
        return f"it is JSON. {run_file}"
    if content.startswith(b"#!") or path.suffix in (".sh", ".py", ".yaml", ".yml"):
        return f"it is a script or YAML. {run_file} If it is verl's, convert it: `retool config from-verl {path}`."
    return ""


def _suggestion(path: Path) -> str:
    """The end of a sentence: suggests a file in the folder, or the file with the nearest name."""
    if path.is_dir():
        inside = sorted(path.glob("*.toml"))
        return f". Name one of its files, such as {inside[0]}." if inside else ". Name a TOML file."
    if "=" in str(path):
        return f". The run file comes first, then the settings: CONFIG {path}"
    candidates = [candidate for folder in (path.parent, Path("configs")) for candidate in sorted(folder.glob("*.toml"))]
    close = difflib.get_close_matches(path.name, [candidate.name for candidate in candidates], n=1)
    return (
        f"; did you mean {next(candidate for candidate in candidates if candidate.name == close[0])}?"
        if close
        else ". Name a TOML file, such as configs/rl_tiny_cpu.toml."
    )


def _require_kind(kind: type[JobConfig], tree: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse a file of the other kind of run with one error instead of one per key."""
    if not tree:
        raise ConfigError(f"{path} has no settings. Start from a file of configs/, such as configs/rl_tiny_cpu.toml.")
    if "train" not in tree:
        return
    if kind is SftConfig and "rollout" in tree:
        raise ConfigError(
            f"{path} is an RL config, because it has a section [rollout], but an SFT config is needed. Did you mean "
            f"`retool rl {path}`?"
        )
    if kind is RlConfig and "rollout" not in tree:
        raise ConfigError(
            f"{path} is an SFT config, because it has no section [rollout], but an RL config is needed. Did you mean "
            f"`retool sft {path}`?"
        )


def build_config[T: JobConfig](kind: type[T], tree: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> T:
    """Like ``load_config``, for parsed TOML. Changes ``tree``. Errors name ``source``."""
    overridden = [_apply(tree, override) for override in overrides]
    tree["source"] = source
    try:
        return kind.model_validate(_expand_home(tree))
    except ValidationError as error:
        raise ConfigError(explain(kind, error, source, overridden)) from error


def _expand_home(value: Any) -> Any:
    """Expand a leading "~/" in every string in ``value``."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, list):
        return [_expand_home(item) for item in cast("list[Any]", value)]
    return {key: _expand_home(item) for key, item in value.items()} if is_table(value) else value


def load_evaluation(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> EvaluationConfig:
    """The evaluation settings of an RL run. Raises ConfigError like ``load_config``."""
    return EvaluationConfig.of(load_config(RlConfig, path, overrides))


def load_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> SftConfig | RlConfig:
    """Load an RL run if the file has a section [rollout], else an SFT run.

    Raises ConfigError like ``load_config``.
    """
    kind = RlConfig if "rollout" in _read(path) else SftConfig
    return load_config(kind, path, overrides)


def _apply(tree: dict[str, Any], override: str) -> str:
    """Apply ``override`` to ``tree`` and return its key. Raises ConfigError."""
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if parts[0] == "verl_overrides":
        parts = ["verl_overrides", ".".join(parts[1:])]
    if not sign or len(parts) != 2 or not all(parts):
        raise ConfigError(f"{override!r} is not of the form section.key=value, for example train.steps=100")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        if text in PYTHON_WORDS:
            raise ConfigError(f"{override}: {text} is Python, not TOML. {PYTHON_WORDS[text]}") from None
        value = text
    table = tree.setdefault(parts[0], {})
    if not isinstance(table, dict):
        raise ConfigError(f"{override!r}: {parts[0]} is not a section of the configuration")
    table[parts[1]] = value
    return ".".join(parts)
