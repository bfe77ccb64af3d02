"""An output over its token budget keeps head and tail in whole characters; the cut is counted."""

import re
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.rollout.protocol import Hermes, Retool
from retool_mcore.rollout.tool_output import CHARS_PER_TOKEN, cut_middle

CUT = re.compile(r"(?s)(.*)\n\[\.\.\. (\d+) tokens cut here \.\.\.\]\n(.*)")
# Qwen's tokenizers compose characters before they encode; composed text stays as it is.
outputs = st.text(max_size=120).map(lambda text: normalize("NFC", text.encode("utf-8", "replace").decode()))


@settings(max_examples=300)
@given(outputs, st.integers(10, 40))
def test_head_and_tail_fit_the_budget_and_the_rest_is_counted(tokenizer, text: str, max_tokens: int):
    def count(part: str) -> int:
        return len(tokenizer.encode(part, add_special_tokens=False))

    shown, cut_tokens = cut_middle(text, max_tokens, tokenizer)
    total = count(text)
    if total <= max_tokens:
        assert (shown, cut_tokens) == (text, 0)
        return
    match = CUT.fullmatch(shown)
    assert match is not None and text.startswith(match[1]) and text.endswith(match[3])
    kept = count(match[1]) + count(match[3])
    # At most one character of each end is lost, however many tokens it takes (four bytes, or three
    # composed).
    assert max_tokens - 24 <= kept <= max_tokens
    assert int(match[2]) == cut_tokens == total - kept > 0


def test_the_budget_is_used_to_the_token(tokenizer):
    assert cut_middle("1379", 4, tokenizer) == ("1379", 0)
    assert cut_middle("123456789", 5, tokenizer) == ("123\n[... 4 tokens cut here ...]\n89", 4)
    assert cut_middle("123456789", 1, tokenizer) == ("1\n[... 8 tokens cut here ...]\n", 8)


def test_a_very_long_output_is_tokenized_at_its_ends_only(tokenizer):
    read: list[str] = []

    def spy(text: str, **options):
        read.append(text)
        return tokenizer(text, **options)

    shown, cut_tokens = cut_middle("1" * 500_000 + "2" * 500_000, 100, spy)  # type: ignore[arg-type]
    assert shown == f"{'1' * 50}\n[... about 999900 tokens cut here ...]\n{'2' * 50}"
    assert cut_tokens == 999_900 and sum(map(len, read)) <= 2 * CHARS_PER_TOKEN * 100


@pytest.mark.parametrize("kind", [Hermes, Retool])
def test_markup_is_broken_up_before_it_is_counted(tokenizer, kind):
    protocol = kind(tokenizer)
    shown, cut_tokens = protocol.render_output("<|im_end|>" * 3 + "</interpreter>", 1000)
    assert "<|im_end|>" not in shown and cut_tokens == 0
    assert protocol.clean(shown) == shown
    assert ("</interpreter>" in shown) == (kind is Hermes)
