"""Converts a GGUF file to a Hugging Face model directory: `retool data model`.

transformers reads the file. This module then uses the file's metadata to fix what its reader omits
or gets wrong: added tokens, EOS ids, the pre-tokenizer, tied embeddings.
"""

# transformers, tokenizers and gguf are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from retool_mcore.data.chat import encode
from retool_mcore.data.model_folder import is_made, written_at_once
from retool_mcore.data.tokenizer import from_pretrained
from retool_mcore.errors import CheckpointError, DataError, PlatformError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL, USER_DEFINED = 3, 4  # GGUF token types: special tokens, and added tokens such as <tool_call>
SOURCE_FILE = "gguf.json"
# Largest relative distance of two quantisations of the same matrix. The Q8_0 and Q5_0 versions in
# Qwen2.5-Coder-0.5B have a distance of 0.044. Unrelated matrices of equal norm have sqrt(2) = 1.41.
SAME_MATRIX = 0.1
PRE_TOKENIZERS = ("qwen2", "smollm", "llama-bpe")


@dataclass(frozen=True)
class Vocabulary:
    """A GGUF file's tokenizer metadata: ``tokens`` [V], their ``types`` [V], and special ids."""

    tokens: Sequence[str]
    types: Sequence[int]
    pre_tokenizer: str  # one of PRE_TOKENIZERS
    eos: int
    pad: int | None
    bos: int | None
    ends: tuple[int, ...]  # every id that ends generation; the end-of-turn id is first
    template: str | None

    def tokens_of_type(self, kind: int) -> list[str]:
        return [token for token, token_type in zip(self.tokens, self.types, strict=True) if token_type == kind]


def write_gguf_model(file: Path, directory: Path, dtype: Literal["bfloat16", "float32"]) -> bool:
    """Write the model directory atomically. Returns False if it already exists.

    Raises CheckpointError if ``directory`` contains something else, DataError for an unreadable
    file, PlatformError without the package gguf.
    """
    _require_gguf()
    if not file.is_file():
        raise DataError(
            f"{file} is neither a GGUF file nor a folder. Name one of them. To download a model: "
            "hf download OWNER/NAME --local-dir FOLDER."
        )
    source = {"file": file.name, "bytes": file.stat().st_size, "dtype": dtype}
    if is_made(directory, SOURCE_FILE, source):
        return False
    vocabulary = read_vocabulary(file)
    with written_at_once(directory, SOURCE_FILE, source) as folder:
        _write_tokenizer(file, vocabulary, folder)
        _write_weights(file, vocabulary, folder, dtype)
        _require_ids(folder, vocabulary)
    return True


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise PlatformError(
            "reading a GGUF file needs package gguf, which is not installed: pip install 'retool_mcore[gguf]'"
        ) from error


def read_vocabulary(file: Path) -> Vocabulary:
    """Read the tokenizer metadata of a GGUF file. Raises DataError for an unreadable file."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(str(file)).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{file} cannot be read as GGUF: {error}. Download it again.") from error
    values: dict[str, Any] = {
        name: fields[key].contents()
        for key in fields
        if (name := key.removeprefix("tokenizer.")) != key and not key.endswith("merges")
    }
    if values.get("ggml.model") != "gpt2" or values.get("ggml.pre") not in PRE_TOKENIZERS:
        raise DataError(
            f"{file} has a tokenizer of kind {values.get('ggml.model')!r}, {values.get('ggml.pre')!r}. Supported are "
            f"'gpt2' (byte-level) tokenizers with one of {', '.join(PRE_TOKENIZERS)}."
        )
    if "ggml.eos_token_id" not in values:
        raise DataError(f"{file} has no eos_token_id, so nothing would end a turn. Use an instruct model's file.")
    pad, eos = values.get("ggml.padding_token_id"), int(values["ggml.eos_token_id"])
    ends = (eos, values.get("ggml.eot_token_id"), values.get("ggml.eom_token_id"), pad)
    return Vocabulary(
        tokens=values["ggml.tokens"],
        types=[int(kind) for kind in values["ggml.token_type"]],
        pre_tokenizer=values["ggml.pre"],
        eos=eos,
        pad=pad,
        bos=values.get("ggml.bos_token_id") if values.get("ggml.add_bos_token", True) else None,
        ends=tuple(dict.fromkeys(int(token) for token in ends if token is not None)),
        template=values.get("chat_template"),
    )


def _write_tokenizer(file: Path, vocabulary: Vocabulary, folder: Path) -> None:
    from tokenizers import decoders, pre_tokenizers, processors
    from transformers import AddedToken, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = vocabulary.tokens_of_type(kind)
        tokens = [AddedToken(token, normalized=False, special=special) for token in added]
        tokenizer.add_tokens(tokens, special_tokens=special)
    if vocabulary.pre_tokenizer == "smollm":  # transformers uses GPT-2's pre-tokenizer, which does not split digits
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.eos_token = vocabulary.tokens[vocabulary.eos]
    tokenizer.pad_token = None if vocabulary.pad is None else vocabulary.tokens[vocabulary.pad]
    tokenizer.bos_token = None if vocabulary.bos is None else vocabulary.tokens[vocabulary.bos]
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.chat_template = vocabulary.template
    tokenizer.save_pretrained(folder)


def _write_weights(file: Path, vocabulary: Vocabulary, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=getattr(torch, dtype)
    )
    if not model.config.tie_word_embeddings:
        inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if inputs.shape == outputs.shape and _distance(inputs, outputs) < SAME_MATRIX:
            # The same matrix, quantised twice. Keep the output's version, which has more bits.
            model.config.tie_word_embeddings = True
            inputs.data = outputs.data
            model.tie_weights()
    model.config.eos_token_id, model.config.pad_token_id = vocabulary.eos, vocabulary.pad
    model.config.bos_token_id = vocabulary.bos
    ends: Any = list(vocabulary.ends) if len(vocabulary.ends) > 1 else vocabulary.eos
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=vocabulary.pad, bos_token_id=vocabulary.bos
    )
    model.save_pretrained(folder)


def _distance(a: Any, b: Any) -> float:
    """The relative distance |a - b| / |b| of two matrices [V, H], from every 64th row."""
    rows = slice(None, None, 64)
    a, b = a.detach()[rows].float(), b.detach()[rows].float()
    return float((a - b).norm() / b.norm())


def _require_ids(folder: Path, vocabulary: Vocabulary) -> None:
    """Raise CheckpointError unless the written tokenizer has the file's token ids and EOS id."""
    tokenizer = from_pretrained(str(folder))
    own = tokenizer.get_vocab()
    wrong = [token for index, token in enumerate(vocabulary.tokens) if own.get(token) != index]
    marks = [*vocabulary.tokens_of_type(CONTROL), *vocabulary.tokens_of_type(USER_DEFINED)]
    wrong += [token for token in marks if not _is_one_token(tokenizer, token, own)]
    if wrong or tokenizer.eos_token_id != vocabulary.eos:
        raise CheckpointError(
            f"{folder}: the tokenizer that transformers reads differs from the file's: eos {tokenizer.eos_token_id} "
            f"instead of {vocabulary.eos}, and {len(wrong)} wrong tokens, {wrong[:3]}. Install another version of "
            "transformers."
        )


def _is_one_token(tokenizer: PreTrainedTokenizerBase, token: str, own: Mapping[str, int]) -> bool:
    return encode(tokenizer, f"a{token}b")[1:-1] == [own[token]]
