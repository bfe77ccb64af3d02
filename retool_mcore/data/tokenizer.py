"""Loads a tokenizer with its chat template.

The template is the model's, a file's, or a built-in one. ``model.template_args`` are set in lines
at the top of the template, so everything that renders with the tokenizer uses them: SFT, rollout,
evaluation, lint, and users of the exported model.
"""

# transformers is only partly typed.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retool_mcore.config.model import BUILT_IN, Model
from retool_mcore.data.chat import set_date
from retool_mcore.data.prompt_format import date_of
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.files import fetch_config, is_hub_name, read_config, require_regular_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# If a directory has none of these files, transformers silently creates an empty tokenizer from
# tokenizer_config.json.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
MAX_NUMBER = 1_000_000  # largest integer that a template may contain
_FOLDER = Path(__file__).parent / "built_in_templates"


def load_tokenizer(
    path: str, chat_template: str = "", template_args: Mapping[str, Any] | None = None, day: date | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local model directory or hub name.

    ``chat_template`` and ``template_args``: as in [model]. ``day``: the date for templates that
    render today's date; None uses the date that the model's run recorded, else today's. Raises
    CheckpointError for an unusable tokenizer or template, ConfigError for a missing template file.
    """
    if (folder := Path(path)).is_dir() and not any(found for name in VOCABULARIES for found in folder.glob(name)):
        raise CheckpointError(
            f"model.path = {path} has no tokenizer: it contains no tokenizer.json. Copy the tokenizer's files into it, "
            "or name another folder."
        )
    if not folder.exists():  # transformers would retry the hub and log each attempt; these functions fail once
        read_config(path) if "/" in path and not is_hub_name(path) else fetch_config(path)
    require_regular_files(folder)
    try:
        tokenizer = from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        is_local = Path(path).is_dir()
        state = "has no readable tokenizer" if is_local else "is neither a local directory nor a readable hub name"
        first_line = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"model.path = {path} {state}: {_broken(folder) or first_line}. Copy or download its files again, or name "
            "another model."
        ) from error
    if chat_template:
        tokenizer.chat_template = read_template(chat_template)
    own = cast("Any", tokenizer).chat_template
    for template in cast("dict[str, str]", own).values() if isinstance(own, dict) else [own or ""]:
        if why := endless(template):
            raise CheckpointError(
                f"rendering the chat template of {path} may never end: {why}. Set model.chat_template"
            )
    if not own:
        raise CheckpointError(
            f"the tokenizer in {path} has no chat template. Use an instruct model's tokenizer, or set "
            f"model.chat_template to a file or to one of {', '.join(BUILT_IN)}"
        )
    if template_args:
        if isinstance(own, dict):
            raise CheckpointError(f"the tokenizer in {path} has several templates. Set model.chat_template to a file")
        tokenizer.chat_template = with_args(own, template_args)
    set_date(tokenizer, day or date_of(path))
    return tokenizer


def endless(template: str) -> str:
    """Why rendering a template might never end or might exhaust memory; "" if it is safe.

    No published template counts to a million or nests loops over ranges. Returns "" for a template
    that Jinja cannot parse; rendering reports that error.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateError, RecursionError):
        return ""
    numbers = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, int)]
    if numbers and max(map(abs, numbers)) > MAX_NUMBER:
        return f"it has the number {max(numbers, key=abs)}"
    if next(tree.find_all(nodes.Pow), None):
        return "it computes a power"
    for outer in tree.find_all(nodes.For):
        if any(_counts(inner) for inner in outer.find_all(nodes.For) if inner is not outer) and _counts(outer):
            return "it has a loop over a range inside another"
    return ""


def _counts(loop: Any) -> bool:
    """Whether a Jinja loop iterates over ``range``."""
    from jinja2 import nodes

    calls = [loop.iter, *loop.iter.find_all(nodes.Call)]
    return any(getattr(getattr(call, "node", None), "name", "") == "range" for call in calls)


def _broken(folder: Path) -> str:
    """The first tokenizer file with invalid JSON, and the error; "" if there is none."""
    for file in sorted(folder.glob("*token*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return f"{file.name}: {error}"
    return ""


def tokenizer_of(model: Model, path: str = "", *, day: date | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a run's [model].

    ``path``: another model whose tokenizer to load with the run's template. ``day``: the date of
    the run or evaluation, for templates that render today's date; see ``pin_date``.
    """
    return load_tokenizer(path or model.path, model.chat_template, model.template_args, day)


def template_of(model: Model) -> str | None:
    """The text of the run's template; None if it is the model's, unchanged."""
    if not model.chat_template and not model.template_args:
        return None
    if model.chat_template:
        return with_args(read_template(model.chat_template), model.template_args)
    return cast("Any", tokenizer_of(model)).chat_template


def read_template(name: str) -> str:
    """The text of a template file or of a built-in template. Raises ConfigError."""
    path = _FOLDER / f"{name}.jinja" if name in BUILT_IN else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template = {name} is neither a readable file ({error}) nor one of {', '.join(BUILT_IN)}"
        ) from error


def with_args(template: str, args: Mapping[str, Any]) -> str:
    """Prepend ``{% set %}`` lines for the arguments. Idempotent. Jinja's literals are JSON's."""
    lines = "".join(
        f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n" for name, value in sorted(args.items())
    )
    return template if template.startswith(lines) else lines + template


def from_pretrained(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with transformers, without running its remote code.

    Raises any exception of transformers; ``load_tokenizer`` is the checked version.
    """
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path, trust_remote_code=False))
