"""Loads a tokenizer with its chat template, and finds out what the template puts between turns.

The template is the model's, a file's, or a built-in one. ``model.template_args`` are set in lines
at the top of the template, so everything that renders with the tokenizer uses them: SFT, rollout,
evaluation, lint, and users of the exported model.
"""

# transformers is only partly typed.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from retool_mcore.config.model import BUILT_IN, Model
from retool_mcore.data.prompt_format import date_of
from retool_mcore.data.tool import CALL_END, CALL_START
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.model.files import fetch_config, is_hub_name, read_config, require_regular_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without one of these files, transformers silently creates an empty tokenizer from
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
            f"model.path = {path} has no tokenizer: no tokenizer.json lies in it. Copy the tokenizer's files beside "
            "the weights, or name another folder."
        )
    if not folder.exists():  # transformers would retry the hub and log each attempt; these functions fail once
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
    set_date(tokenizer, day or date_of(path))
    return tokenizer


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    own = cast("Any", tokenizer).chat_template
    if isinstance(own, dict):
        return list(cast("dict[str, str]", own).values())
    return [own] if isinstance(own, str) else []


def endless(template: str) -> str:
    """Why rendering a template might never end or exhaust memory; "" if it is safe.

    No published template counts to a million or nests loops over ranges. Returns "" for a template
    that Jinja cannot parse; rendering reports that error.
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
    return _own(tokenizer_of(model))


def _own(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's template; None if it has several."""
    own = cast("Any", tokenizer).chat_template
    return own if isinstance(own, str) else None


def read_template(name: str) -> str:
    """The text of a template file or of a built-in template. Raises ConfigError."""
    path = _FOLDER / f"{name}.jinja" if name in BUILT_IN else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template = {name} is no file that can be read ({error}), and none of {', '.join(BUILT_IN)}"
        ) from error


def with_args(template: str, args: Mapping[str, Any]) -> str:
    """Prepend ``{% set %}`` lines for the arguments. Idempotent."""
    lines = "".join(f"{{% set {name} = {_literal(value)} %}}\n" for name, value in sorted(args.items()))
    return template if template.startswith(lines) else lines + template


def _literal(value: Any) -> str:
    """A TOML value as a Jinja literal, which has the same syntax as JSON."""
    return json.dumps(value, ensure_ascii=False)


def from_pretrained(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with transformers, without running its remote code.

    Raises any exception of transformers; ``load_tokenizer`` is the checked version.
    """
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path, trust_remote_code=False))


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The directory or hub name of the tokenizer; "" if it was created in memory."""
    return cast("str", tokenizer.name_or_path)


def set_date(tokenizer: PreTrainedTokenizerBase, day: date) -> None:
    """Set the date that templates render as today's."""
    cast("Any", tokenizer).prompt_date = day


def _strftime(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    day: date | None = getattr(tokenizer, "prompt_date", None)
    return {} if day is None else {"strftime_now": datetime.combine(day, time()).strftime}


def has_several_templates(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has several named templates, such as "default" and "tool_use"."""
    return isinstance(cast("Any", tokenizer).chat_template, dict)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text, without special tokens added."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text that continues other tokens.

    Some SentencePiece tokenizers (Mistral's first ones) add a space before the first word. This
    function prevents it, because a later piece has no such space.
    """
    guard = _guard(tokenizer)
    return encode(tokenizer, guard + text)[1:] if guard else encode(tokenizer, text)


@lru_cache(maxsize=8)
def _guard(tokenizer: PreTrainedTokenizerBase) -> str:
    """A control token to prepend when encoding a piece; "" if the tokenizer adds no space."""
    for token in (tokenizer.bos_token, tokenizer.eos_token):
        if isinstance(token, str):
            ids = encode(tokenizer, f"{token}x")
            return token if len(encode(tokenizer, token)) == 1 and ids[1:] != encode(tokenizer, "x") else ""
    return ""


def decode(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    clean_up: bool | None = None,
    control_tokens: bool = True,
) -> str:
    """Decode token ids [T], with or without control tokens.

    ``clean_up``: whether to remove spaces before punctuation; None uses the tokenizer's setting.
    """
    skip = not control_tokens
    # An array, because transformers checks the type of each element of a list, which takes longer
    # than decoding.
    ids = np.asarray(token_ids, dtype=np.int64)
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=clean_up)
    assert isinstance(text, str), "one sequence decodes to one string"
    return text


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render a conversation with the chat template, using the date of ``set_date``.

    Raises jinja2.TemplateError if the template rejects it.
    """
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] if tools else None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **_strftime(tokenizer),
    )
    assert isinstance(text, str), "apply_chat_template(tokenize=False) of one conversation gives one string"
    return text


Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# Markup of the Hermes format, which the tokenizer may or may not have tokens for.
HERMES_MARKUP = (CALL_START, CALL_END, "<tool_response>", "</tool_response>")
PROBE = "retool-probe"
_SHOWN = 60  # characters of a difference to show in an error


@dataclass(frozen=True)
class ChatFormat:
    """How the template ends and starts turns; see ``chat_format``."""

    end_of_turn: str  # "<|im_end|>": a single token, possibly with whitespace before it
    end_of_turn_id: int
    after: str  # text after end_of_turn: a line break for ChatML
    added: bool  # the template has no end-of-turn token, so training and sampling use eos_token
    opened: str  # text after the header that only a generation prompt has: "<think>\n" for R1
    specials: tuple[str, ...]  # tokens that no message may contain
    markup: re.Pattern[str]  # markup that a tool's output must not forge
    # The tokenizer's normaliser for added tokens. Some fold case or full-width letters.
    normalised: Callable[[str], str] = str


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """The end-of-turn token and its id. Raises CheckpointError."""
    fmt = chat_format(tokenizer)
    return fmt.end_of_turn.strip(), fmt.end_of_turn_id


@lru_cache(maxsize=8)
def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Find out how the template ends and starts a turn. Cached per tokenizer.

    If the template has no end-of-turn token, the tokenizer's eos_token is used. Raises
    CheckpointError if there is no eos_token either, or if the conversation does not start with the
    prompt of its last turn; the message has a minimal example. ``chat.require_tool_turns`` checks
    tool turns separately.
    """
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if len(str(token).strip()) > 1]
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}
    try:
        prompt = rendered(tokenizer, [question], None, add_generation_prompt=True)
        text = rendered(tokenizer, [question, answer], None, add_generation_prompt=False)
    except DataError as error:
        raise CheckpointError(f"{error}. It was asked for one user turn and its answer") from error
    if PROBE not in text:
        raise CheckpointError(f"the chat template renders an assistant turn as {text!r}, without what it says")
    after = text[text.index(PROBE) + len(PROBE) :]
    opened = _opened(prompt, text)
    _require_exact(tokenizer, prompt, text)
    blank = after[: len(after) - len(after.lstrip())]
    first_id = encode_piece(tokenizer, after[len(blank) :])[:1]
    end_token = decode(tokenizer, first_id)
    added_end = not end_token.strip() or end_token not in added or not after.startswith(blank + end_token)
    if added_end:
        blank, end_token = "", _eos_of(tokenizer, after)
        first_id = encode_piece(tokenizer, end_token)
    normalised = _normaliser(tokenizer)
    marks = {*added, *map(normalised, added), *HERMES_MARKUP} - {""}
    _require_same_end(tokenizer, "" if added_end else blank + end_token)
    return ChatFormat(
        end_of_turn=blank + end_token,
        end_of_turn_id=first_id[0],
        after=after if added_end else after[len(blank + end_token) :],
        added=added_end,
        opened=opened,
        specials=tuple(dict.fromkeys((*tokenizer.all_special_tokens, *specials, end_token))),
        markup=re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len)[::-1])),
        normalised=normalised,
    )


def _eos_of(tokenizer: PreTrainedTokenizerBase, after: str) -> str:
    token = tokenizer.eos_token
    if not isinstance(token, str) or len(encode_piece(tokenizer, token)) != 1:
        raise CheckpointError(
            f"the chat template closes an assistant turn by {after!r}, which does not start with a control token, and "
            f"the tokenizer of {name_of(tokenizer)!r} has no eos_token of one token: a rollout could not see the end"
        )
    return token


def _normaliser(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    added: Any = tokenizer.added_tokens_decoder.values()
    folds = any(bool(token.normalized) for token in added)
    normaliser: Any = getattr(backend, "normalizer", None) if folds else None
    return normaliser.normalize_str if normaliser is not None else str


def _require_same_end(tokenizer: PreTrainedTokenizerBase, end: str) -> None:
    """Raise CheckpointError if earlier assistant turns end differently from the last one.

    ``render`` looks for the next occurrence of ``end``, so it would otherwise put loss on the
    user's text before that. ``end``: "" for a template without an end-of-turn token.
    """
    turns = [("user", "x"), ("assistant", PROBE), ("user", "y"), ("assistant", "z")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = rendered(tokenizer, messages, None, add_generation_prompt=False)
    except DataError:
        return  # a single-turn template; rendering a longer conversation raises the error
    after = text[text.index(PROBE) + len(PROBE) :] if PROBE in text else end
    if not after.startswith(end):
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} ends the last assistant turn by {end!r} and an earlier one "
            f"by {after[: len(end) + 20]!r}, so a rollout could not tell where a turn ends. The shortest example is "
            'two user turns, each with an answer. Set model.chat_template ("chatml" is one)'
        )


def _opened(prompt: str, text: str) -> str:
    """The text that the prompt has after the header of a turn, such as "<think>\\n".

    Raises CheckpointError if the conversation does not start with the prompt for another reason.
    """
    if text.startswith(prompt):
        return ""
    header = prompt[: _common(prompt, text)]
    opened, instead = prompt[len(header) :], text[len(header) :]
    if opened.startswith("<think>") and instead.lstrip().startswith(PROBE):
        return opened
    raise CheckpointError(
        "the chat template is not stable: a prompt is no beginning of the conversation with its answer, so training "
        f'would not see what sampling saw. The shortest example is a user turn "x" and its answer "{PROBE}": after '
        f"{header[-_SHOWN:]!r} the prompt goes on with {opened[:_SHOWN]!r}, and the conversation with "
        f"{instead[:_SHOWN]!r}. Set model.template_args if an argument of the template decides it, or "
        "model.chat_template"
    )


def _require_exact(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> None:
    """Check that separately tokenized prompt and turn decode to the text that was rendered.

    Raises CheckpointError.
    """
    cut = _common(prompt, text)
    ids = [*encode(tokenizer, text[:cut]), *encode_piece(tokenizer, text[cut:])]
    spelt = decode(tokenizer, ids, clean_up=False)
    if spelt.removeprefix(" ") != text.removeprefix(" "):
        at = _common(spelt, text)
        raise CheckpointError(
            f"the tokenizer of {name_of(tokenizer)!r} does not spell what the chat template renders, put together "
            f"by turns: it has {spelt[at : at + _SHOWN]!r} for {text[at : at + _SHOWN]!r}. Use a byte-level tokenizer"
        )


def _common(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render a conversation. Raises DataError if the template rejects it."""
    from jinja2 import TemplateError

    try:
        return apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
