"""Markdown is plain English: the worst words of our former dialect do not come back."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# "there is no ..." and "is no longer" are ordinary English.
REJECTED_WORDS = re.compile(
    r"\b(told|besides?|of (?:its|their) own|go(?:es)? on|(?<!there )(?:is|are) no(?! longer)|by plan|in words)\b", re.I
)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`|<!--.*?-->", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}.*)?\n)+")
# Proper uses, as (file, sentence): the sentence stands in the file and is not searched.
ALLOWED: set[tuple[str, str]] = set()


def pages() -> list[str]:
    """The tracked Markdown files; all of them in a tree without git."""
    found = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = [name for name in found.stdout.splitlines() if (ROOT / name).is_file()]
    return tracked or [str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.md")) if not hidden(path)]


def hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "runs" for part in path.relative_to(ROOT).parts)


def prose(text: str) -> str:
    """The text without code, in which every line keeps its number."""
    for code in (CODE, INDENTED):
        text = code.sub(lambda match: "\n" * match[0].count("\n"), text)
    return text


def faults(text: str) -> Iterator[str]:
    """The worst words with their lines. A line break may be in the middle of one."""
    plain = prose(text)
    for match in REJECTED_WORDS.finditer(re.sub(r"\s", " ", plain)):
        yield f"line {plain.count(chr(10), 0, match.start()) + 1}: {match[0]}"


@pytest.mark.parametrize("page", pages())
def test_a_page_is_without_the_worst_words(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    for sentence in (sentence for file, sentence in ALLOWED if file == page):
        assert sentence in text, f"remove from ALLOWED: {sentence}"
        text = text.replace(sentence, "\n" * sentence.count("\n"))
    assert not list(faults(text)), "write who does what, in the field's terms; ALLOWED takes proper uses"
