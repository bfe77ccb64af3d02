"""Templates as they lie in the wild, written for tests after the forms of the models' own, and
small tokenizers for them. ``STYLES`` has what is taken; configs/TEMPLATES.md is made from it.
"""

import string
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
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_TOKENS = (
    "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>",
)  # fmt: skip
MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[ARGS]",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Style:
    """A template with its tokens; ``tools`` is the protocol of its own calls, "" for none.

    ``message``: part of the refusal; "" if the template is accepted. ``words_before_call``: whether
    the template keeps the text before a call.
    """

    name: str
    file: str  # of tests/templates, or one of the package's own
    tokens: tuple[str, ...] = CHATML_TOKENS
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


QWEN: dict[str, Any] = {"plain_tokens": TOOL_TOKENS, "tools": "hermes"}
LLAMA: dict[str, Any] = {
    "tokens": LLAMA_TOKENS,
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "tools": "llama3",
    "words_before_call": False,
}
MISTRAL: dict[str, Any] = {"tokens": MISTRAL_TOKENS, "bos": "<s>", "eos": "</s>", "tools": "mistral"}
BASE: dict[str, Any] = {"tokens": ("<|endoftext|>",), "eos": "<|endoftext|>"}
STYLES = [
    Style(name="Qwen2.5, Qwen2.5-Coder", file="qwen2.5", **QWEN),
    Style(name="Qwen2.5 with tags of several tokens", file="qwen2.5", tools="hermes"),
    Style(name="Qwen3: an empty thinking block", file="qwen3", **QWEN),
    Style(name="Qwen3 with enable_thinking = false", file="qwen3", args={"enable_thinking": False}, **QWEN),
    Style(name="Qwen3-Thinking: the prompt opens the thinking block", file="qwen3_thinking", **QWEN),
    Style(name="Qwen3-Coder", file="qwen3_coder", **{**QWEN, "tools": "qwen3_coder"}),
    Style(
        name="R1-Distill: the prompt opens the thinking block, earlier turns drop it",
        file="r1_distill",
        tokens=("<s>", "</s>", "<|User|>", "<|Assistant|>"),
        plain_tokens=("<think>", "</think>"),
        bos="<s>",
        eos="</s>",
    ),
    Style(name="Llama 3.1, 3.2, 3.3", file="llama3", **LLAMA),
    Style(name="Llama 3 with python_tag", file="llama3_python_tag", **LLAMA),
    Style(name="Mistral v3: a list of calls", file="mistral_v3", words_before_call=False, metaspace=True, **MISTRAL),
    Style(name="Mistral v11: name and arguments", file="mistral_v11", **MISTRAL),
    Style(
        name="Gemma 2: no system turn, no tools",
        file="gemma2",
        tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
    ),
    Style(name="SmolLM2: plain ChatML", file="plain_chatml"),
    Style(name='a base model with "chatml"', file="chatml", **QWEN),
    Style(name='a base model with "plain"', file="plain", **BASE),
    Style(name="ChatML without its special tokens: eos_token ends a turn", file="plain_chatml", **BASE),
    Style(name="role names and colons: eos_token ends a turn", file="colons", **BASE),
    Style(name="earlier text changes with later turns", file="shifting", message="not stable"),
    Style(name="no end-of-turn token, no eos_token", file="colons", message="has no eos_token of one token", eos=None),
]
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
