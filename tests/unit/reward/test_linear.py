"""What runs outside of the checkers is linear: no response can stall the scorer."""

import importlib
import pkgutil
import re
import time
from pathlib import Path

import pytest

import retool_mcore.reward
from retool_mcore.data.files import read_jsonl
from retool_mcore.reward.answer import judge
from retool_mcore.reward.clean import MAX_ANSWER_CHARS
from retool_mcore.reward.statement import quick_verdict, statement_of, vote

SIZE = 20_000
PATTERNS = {
    f"{module.name}.{name}": pattern
    for module in pkgutil.iter_modules(retool_mcore.reward.__path__)
    for name, pattern in vars(importlib.import_module(f"retool_mcore.reward.{module.name}")).items()
    if isinstance(pattern, re.Pattern)
}
# Answers that took seconds to minutes before patterns were linear, and their kin: pieces, and how
# often each is repeated.
STALLING = [
    "".join(piece * times for piece, times in case["pieces"])
    for _, case in read_jsonl(Path(__file__).with_name("stalling.jsonl"))
]


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_takes_linear_time_on_20_kb_of_its_own_characters(name: str):
    pattern = PATTERNS[name]
    characters = sorted(set(pattern.pattern) | set(" 0a,.\t\n\\{}<>"))  # also those that classes stand for
    pieces = re.findall(r"[a-z_]{2,}|\\\\[a-z]+", pattern.pattern)
    more = ["1,", "1 ", r"\ ", r"\text{", "<answer>", "```py\n", "1,234"]
    for piece in (*characters, *pieces, *more):
        text = "1" + piece * (SIZE // len(piece)) + "\x00"
        for use in (pattern.search, pattern.fullmatch):  # a search also tries what match and sub would
            started = time.process_time()
            use(text)
            assert time.process_time() - started < 0.1, (name, piece, use)


@pytest.mark.parametrize("answer", STALLING, ids=range(len(STALLING)))
def test_answers_that_stalled_the_scorer_take_no_time_outside_of_a_checker(answer: str):
    started = time.process_time()
    for text in (answer, answer[:MAX_ANSWER_CHARS] + " ", answer * 20):
        statement_of(text)
        vote(text)
        quick_verdict(text, r"\frac{1}{3}")
    judge(answer, r"\frac{1}{3}")
    assert time.process_time() - started < 0.5
