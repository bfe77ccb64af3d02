"""Templates as they lie in the wild, written for tests after the forms of the models' own, and
small tokenizers for them. ``STYLES`` has what is taken; configs/TEMPLATES.md is made from it.
"""

import string
import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retool_mcore.data.tokenizer import read_template, with_args

WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "What is the sum of the integers from 412 to 967, inclusive?\n\nprint(sum(range(412, 967 + 1)))\n",
    "The answer is \\boxed{12345}.\n\nuser\nassistant\nsystem\n",
    '{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "',
]
TABLES = tomllib.loads(Path(__file__).with_name("template_styles.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Style:
    """A template with its tokens; ``tools`` is the protocol of its own calls, "" for none.

    ``message``: part of the refusal; "" if the template is accepted. ``words_before_call``: whether
    the template keeps the text before a call.
    """

    name: str
    file: str  # of tests/templates, or one of the package's own
    tokens: tuple[str, ...] = tuple(TABLES["tokens"]["chatml"])
    plain_tokens: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = "<|im_end|>"
    tools: str = ""
    words_before_call: bool = True
    args: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    metaspace: bool = False  # a tokenizer of the SentencePiece kind, with a space before its first word

    @property
    def template(self) -> str:
        own = Path(__file__).parent / "templates" / f"{self.file}.jinja"
        return read_template(str(own) if own.is_file() else self.file)


def style_of(row: dict[str, Any]) -> Style:
    """A row of template_styles.toml, in which a list of tokens may be named, and eos "" is none."""
    found = {key: row[key] for key in ("tokens", "plain_tokens") if key in row}
    lists = {
        key: tuple(TABLES["tokens"].get(value, value) if isinstance(value, str) else value)
        for key, value in found.items()
    }
    return Style(**{**row, **lists, **({"eos": None} if row.get("eos") == "" else {})})


STYLES = [style_of(row) for row in TABLES["style"]]
TAKEN = [style for style in STYLES if not style.message]


@lru_cache(maxsize=len(STYLES))
def tokenizer_in(name: str) -> PreTrainedTokenizerFast:
    style = next(style for style in STYLES if style.name == name)
    backend = Tokenizer(models.BPE())
    if style.metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted(string.printable)
    else:
        split = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in style.tokens])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in style.plain_tokens])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=style.bos, eos_token=style.eos, pad_token=style.eos or style.tokens[0]
    )
    made.chat_template = with_args(style.template, style.args)
    return made
