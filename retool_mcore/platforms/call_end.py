"""Where a call's closing tag of several tokens is complete, decided by token ids alone.

Loops and engines share it. SGLang's scheduler, which has no tokenizer, uses it in
patches_sglang.py. A server without that patch stops at each token that can complete the tag, and
the loop sends the next request.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Self

TABLE = "retool_call_end"  # in SGLang's custom_params: CallEnd.text
TURN_TOKENS = "retool_turn_tokens"  # how many tokens at the prompt's end belong to the turn


class CallEnd:
    """The tokens that spell a tag, from its end to its start.

    ``left[n]`` has the tokens that can stand where the first n characters of the tag must end, and
    for each how many characters must then end before it; 0 where the tag has begun. Its last entry
    is for the tokens that complete the tag, whatever else they hold after it.
    """

    def __init__(self, left: Sequence[Mapping[int, int]]) -> None:
        self.left = tuple(dict(each) for each in left)
        self.completing = frozenset(self.left[-1])
        self.text = _written(self.left)

    @classmethod
    def of(cls, vocabulary: Mapping[str, int], tag: str) -> Self:
        """The tokens of ``vocabulary``, text -> token id.

        Tags are ASCII, which byte-level tokenizers keep unchanged in the names of their tokens. The
        last character of a tag comes once in it, so that a token completes it in one way only.
        """
        assert tag.index(tag[-1]) == len(tag) - 1, f"the last character of {tag} comes twice"
        left: list[dict[int, int]] = [{} for _ in range(len(tag) + 1)]
        for name, token_id in vocabulary.items():
            for end in range(1, len(tag)):
                start = end - len(name)
                if name.endswith(tag[:end]):
                    left[end][token_id] = 0
                elif name and start > 0 and tag[start:end] == name:
                    left[end][token_id] = start
            if tag in name:
                left[-1][token_id] = 0
            else:
                for cut in range(1, len(tag)):
                    if name.startswith(tag[cut:]):
                        left[-1][token_id] = cut
        return cls(left)

    @classmethod
    def read(cls, text: str) -> Self:
        """What ``text`` of another process says."""
        left = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls([{of: int(start) for start, steps in each.items() for of in accumulate(steps)} for each in left])

    @property
    def max_tokens(self) -> int:
        """The most tokens over which a tag can be spread."""
        return len(self.left) - 1

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Does the last of ``token_ids`` [T] complete the tag?"""
        needed = self.max_tokens
        for token_id in reversed(token_ids[-needed:]):
            found = self.left[needed].get(token_id)
            if found is None:
                return False
            needed = found
            if needed == 0:
                return True
        return False


def _written(left: Sequence[Mapping[int, int]]) -> str:
    """``left`` in few bytes, since each request has it: 1.3 kB for the 464 tokens of Qwen2.5.

    For each start the token ids, each as its distance from the one before.
    """
    found: list[dict[int, list[int]]] = []
    for each in left:
        of_start: dict[int, list[int]] = {}
        for token_id, start in sorted(each.items()):
            of_start.setdefault(start, []).append(token_id)
        found.append({start: [b - a for a, b in pairwise([0, *ids])] for start, ids in of_start.items()})
    return base64.b64encode(zlib.compress(json.dumps(found, separators=(",", ":")).encode(), 9)).decode()
