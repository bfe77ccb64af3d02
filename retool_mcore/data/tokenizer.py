"""A tokenizer with its chat template: how they are read, and what the template puts between turns.

The template is the model's own, a file's, or one of ours. ``model.template_args`` become its first
line. So whatever renders with the tokenizer renders with them: SFT, rollout, evaluation, lint, and
those who use the exported model.
"""

# transformers' own types say only half of what is used here.
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

# Without one of them transformers makes a tokenizer of nothing, from tokenizer_config.json alone.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
MAX_NUMBER = 1_000_000  # in a template
_FOLDER = Path(__file__).parent / "built_in_templates"


def load_tokenizer(
    path: str, chat_template: str = "", template_args: Mapping[str, Any] | None = None, day: date | None = None
) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a local model directory or hub name.

    ``chat_template`` and ``template_args`` are as in [model]. ``day``: what templates with today's
    date write; None: the day that the model's run has recorded, else today. Raises CheckpointError
    naming the path, and ConfigError for a template that is not there.
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
    set_date(tokenizer, day or date_of(path))
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


def tokenizer_of(model: Model, path: str = "", *, day: date | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer that a run renders with; ``path``: of another model, with the same template.

    ``day``: of the run or evaluation, for templates with today's date; see ``pin_date``.
    """
    return load_tokenizer(path or model.path, model.chat_template, model.template_args, day)


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


def from_pretrained(path: str) -> PreTrainedTokenizerBase:
    """Read a tokenizer; code that comes with it is not run. Raises whatever transformers raises.

    See ``chat.load_tokenizer``.
    """
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path, trust_remote_code=False))


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where the tokenizer came from: a directory or a hub name; "" if it was made in memory."""
    return cast("str", tokenizer.name_or_path)


def set_date(tokenizer: PreTrainedTokenizerBase, day: date) -> None:
    """Let templates with today's date write ``day``."""
    cast("Any", tokenizer).prompt_date = day


def _strftime(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    day: date | None = getattr(tokenizer, "prompt_date", None)
    return {} if day is None else {"strftime_now": datetime.combine(day, time()).strftime}


def has_several_templates(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has templates by name, such as "default" and "tool_use"."""
    return isinstance(cast("Any", tokenizer).chat_template, dict)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text, with nothing added."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text that follows other tokens.

    Some tokenizers of the SentencePiece kind (Mistral's first ones) put a space before the first
    word of whatever they encode, which is none of a later piece.
    """
    guard = _guard(tokenizer)
    return encode(tokenizer, guard + text)[1:] if guard else encode(tokenizer, text)


@lru_cache(maxsize=8)
def _guard(tokenizer: PreTrainedTokenizerBase) -> str:
    """A control token after which a piece is encoded, where that makes a difference."""
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
    """The text of token ids [T], with or without control tokens.

    ``clean_up``: whether spaces before punctuation are removed; None: as the tokenizer is set.
    """
    skip = not control_tokens
    # Of a list transformers asks each number what it is, which takes longer than decoding them all.
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
    """One conversation as text, on the day of ``set_date``.

    Raises jinja2.TemplateError when the template refuses it.
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

# Markup that structures a hermes conversation whether or not the tokenizer has tokens for it.
HERMES_MARKUP = (CALL_START, CALL_END, "<tool_response>", "</tool_response>")
PROBE = "retool-probe"
_SHOWN = 60  # characters of a difference


@dataclass(frozen=True)
class ChatFormat:
    """What the template puts between turns; see ``chat_format``."""

    end_of_turn: str  # "<|im_end|>": ends in one token, before which the template may put blanks
    end_of_turn_id: int
    after: str  # what the template writes then: a line break of ChatML
    added: bool  # the template ends a turn by no token, so training and sampling put eos_token there
    opened: str  # what only a prompt has after the header of the turn to sample: "<think>\n" of R1
    specials: tuple[str, ...]  # tokens that no message may contain
    markup: re.Pattern[str]  # markup that a tool's output must not be able to forge
    # A text as the tokenizer looks for added tokens in it: some fold case or full-width letters.
    normalised: Callable[[str], str] = str


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """The token that ends the model's turns, and its id. Raises CheckpointError."""
    fmt = chat_format(tokenizer)
    return fmt.end_of_turn.strip(), fmt.end_of_turn_id


@lru_cache(maxsize=8)
def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Find how the template ends a turn and opens one. Cached per tokenizer.

    A turn that the template closes by no token is closed by the tokenizer's eos_token. Raises
    CheckpointError when there is none either, or when the prompt of a turn is no beginning of the
    conversation with it, with the shortest example. Tool turns are asked of it by
    ``chat.require_tool_turns``, where they are rendered.
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
    """Raise CheckpointError where an earlier assistant turn ends otherwise than the last one.

    Where the next occurrence of the last turn's end was taken, training would learn the user's text
    between them. ``end``: "" for a template that writes none.
    """
    turns = [("user", "x"), ("assistant", PROBE), ("user", "y"), ("assistant", "z")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = rendered(tokenizer, messages, None, add_generation_prompt=False)
    except DataError:
        return  # a template for one turn; conversations of more are refused where they are rendered
    after = text[text.index(PROBE) + len(PROBE) :] if PROBE in text else end
    if not after.startswith(end):
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} ends the last assistant turn by {end!r} and an earlier one "
            f"by {after[: len(end) + 20]!r}, so a rollout could not tell where a turn ends. The shortest example is "
            'two user turns, each with an answer. Set model.chat_template ("chatml" is one)'
        )


def _opened(prompt: str, text: str) -> str:
    """What the prompt has beyond the header of a turn.

    Raises CheckpointError where it is no beginning of the conversation for another reason.
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
    """Tokens that are put together from a prompt and a turn spell what the template renders."""
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
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """A conversation as the template writes it. Raises DataError when the template refuses it."""
    from jinja2 import TemplateError

    try:
        return apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
