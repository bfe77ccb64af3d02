"""Tokenizers with the template that a run's settings ask for: the model's, a file, or one of ours.

``model.template_args`` become the template's first line. So whatever renders with the tokenizer
renders with them: SFT, rollout, evaluation, lint, and those who use the exported model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retool_mcore.config.model import BUILT_IN, Model
from retool_mcore.data.tokenizer import from_pretrained
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.files import fetch_config, is_hub_name, read_config, require_regular_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without one of them transformers makes a tokenizer of nothing, from tokenizer_config.json alone.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
MAX_NUMBER = 1_000_000  # in a template
_FOLDER = Path(__file__).parent / "built_in_templates"


def load_tokenizer(
    path: str, chat_template: str = "", template_args: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a local model directory or hub name.

    ``chat_template`` and ``template_args`` are as in [model]. Raises CheckpointError naming the
    path, and ConfigError for a template that is not there.
    """
    if (folder := Path(path)).is_dir() and not any(found for name in VOCABULARIES for found in folder.glob(name)):
        raise CheckpointError(
            f"model.path = {path} has no tokenizer: no tokenizer.json lies in it. Copy the tokenizer's files beside "
            "the weights, or name another folder."
        )
    if not folder.exists():  # transformers asks the hub many times, a line for each; these say it once
        read_config(path) if "/" in path and not is_hub_name(path) else fetch_config(path)
    require_regular_files(folder)
    try:
        tokenizer = from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        state = "is no tokenizer" if Path(path).is_dir() else "is neither a directory here nor a hub name"
        first_line = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"model.path = {path} {state} that can be read: {_broken(folder) or first_line}. Copy or fetch its files "
            "again, or name another model."
        ) from error
    if chat_template:
        tokenizer.chat_template = read_template(chat_template)
    for template in _templates(tokenizer):
        if why := endless(template):
            raise CheckpointError(f"the chat template of {path} is not rendered: {why}. Set model.chat_template")
    if not getattr(tokenizer, "chat_template", None):
        raise CheckpointError(
            f"the tokenizer in {path} has no chat template. Use an instruct model's tokenizer, or set "
            f"model.chat_template to a file or to one of {', '.join(BUILT_IN)}"
        )
    if template_args:
        own = _own(tokenizer)
        if own is None:
            raise CheckpointError(f"the tokenizer in {path} has several templates. Set model.chat_template to a file")
        tokenizer.chat_template = with_args(own, template_args)
    return tokenizer


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    own = cast("Any", tokenizer).chat_template
    if isinstance(own, dict):
        return list(cast("dict[str, str]", own).values())
    return [own] if isinstance(own, str) else []


def endless(template: str) -> str:
    """Why rendering a template may never end, or take all memory; "" if it does neither.

    No published template counts to a million or nests loops over numbers. What Jinja cannot parse
    is left to those who render it.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateError, RecursionError):
        return ""
    if large := next((each for each in tree.find_all(nodes.Const) if _is_large(each.value)), None):
        return f"it has the number {large.value}"
    if next(tree.find_all(nodes.Pow), None):
        return "it has a power of a number"
    for outer in tree.find_all(nodes.For):
        if any(_counts(inner) for inner in outer.find_all(nodes.For) if inner is not outer) and _counts(outer):
            return "it has a loop over numbers in another one"
    return ""


def _is_large(value: object) -> bool:
    return isinstance(value, int) and abs(value) > MAX_NUMBER


def _counts(loop: Any) -> bool:
    """Whether a loop goes over a range of numbers."""
    from jinja2 import nodes

    calls = [loop.iter, *loop.iter.find_all(nodes.Call)]
    return any(getattr(getattr(call, "node", None), "name", "") == "range" for call in calls)


def _broken(folder: Path) -> str:
    """The first of a tokenizer's files that is no JSON, and why; "" if none is."""
    for file in sorted(folder.glob("*token*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return f"{file.name}: {error}"
    return ""


def tokenizer_of(model: Model, path: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer that a run renders with; ``path``: of another model, with the same template."""
    return load_tokenizer(path or model.path, model.chat_template, model.template_args)


def template_of(model: Model) -> str | None:
    """The text of the run's template; None where it is the model's own, unchanged."""
    if not model.chat_template and not model.template_args:
        return None
    if model.chat_template:
        return with_args(read_template(model.chat_template), model.template_args)
    return _own(tokenizer_of(model))


def _own(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's template; None where it has several."""
    own = cast("Any", tokenizer).chat_template
    return own if isinstance(own, str) else None


def read_template(name: str) -> str:
    """The text of a template: of a file, or one of ours."""
    path = _FOLDER / f"{name}.jinja" if name in BUILT_IN else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template = {name} is no file that can be read ({error}), and none of {', '.join(BUILT_IN)}"
        ) from error


def with_args(template: str, args: Mapping[str, Any]) -> str:
    """The template with its arguments set in it. Setting them again changes nothing."""
    lines = "".join(f"{{% set {name} = {_literal(value)} %}}\n" for name, value in sorted(args.items()))
    return template if template.startswith(lines) else lines + template


def _literal(value: Any) -> str:
    """A value of TOML as Jinja writes it; JSON's true and false are Jinja's."""
    return json.dumps(value, ensure_ascii=False)
