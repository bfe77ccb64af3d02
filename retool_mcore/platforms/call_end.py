"""Detects the closing tag of a tool call, which spans several tokens, from token ids alone.

Agent loops and engines share it. SGLang's scheduler, which has no tokenizer, uses it in
patches_sglang.py. A server without that patch stops at each token that can complete the tag, and
the loop continues the turn with another request.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Self

# Keys in SGLang's custom_params:
TABLE = "retool_call_end"  # CallEnd.as_json
TURN_TOKENS = "retool_turn_tokens"  # number of tokens at the end of the prompt that belong to the turn


class CallEnd:
    """A table that matches a tag backwards, token by token.

    ``remaining[n]``: each token that can end at the tag's n-th character -> number of the tag's
    characters before the token; 0 if the token contains the tag's start.
    The last entry has the tokens that complete the tag; they may extend past it.
    """

    def __init__(self, remaining: Sequence[Mapping[int, int]]) -> None:
        self.remaining = tuple(dict(level) for level in remaining)
        self.completing = frozenset(self.remaining[-1])
        self.as_json = json.dumps(self.remaining)  # 5 kB for the 464 tokens of Qwen2.5

    @classmethod
    def of(cls, vocabulary: Mapping[str, int], tag: str) -> Self:
        """Build the table of ``tag`` for ``vocabulary``, which maps token text to id.

        Tags are ASCII, which byte-level tokenizers keep unchanged in the text of their tokens. The
        last character of a tag must occur only once in it, so that a token can complete it in only
        one way.
        """
        assert tag.index(tag[-1]) == len(tag) - 1, f"the last character of {tag} occurs twice"
        remaining: list[dict[int, int]] = [{} for _ in range(len(tag) + 1)]
        for name, token_id in vocabulary.items():
            for end in range(1, len(tag)):
                start = end - len(name)
                if name.endswith(tag[:end]):
                    remaining[end][token_id] = 0
                elif name and start > 0 and tag[start:end] == name:
                    remaining[end][token_id] = start
            if tag in name:
                remaining[-1][token_id] = 0
            else:
                for cut in range(1, len(tag)):
                    if name.startswith(tag[cut:]):
                        remaining[-1][token_id] = cut
        return cls(remaining)

    @classmethod
    def read(cls, as_json: str) -> Self:
        """Decode the ``as_json`` of a CallEnd in another process."""
        return cls([{int(token_id): start for token_id, start in level.items()} for level in json.loads(as_json)])

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens in the tag."""
        return len(self.remaining) - 1

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token of ``token_ids`` [T] completes the tag."""
        needed = self.max_tokens
        for token_id in reversed(token_ids[-needed:]):
            before = self.remaining[needed].get(token_id)
            if before is None:
                return False
            needed = before
            if needed == 0:
                return True
        return False
