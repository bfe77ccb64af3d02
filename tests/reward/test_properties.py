"""Whatever the value, all ways to write it are equal, and no way to write another one is."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.reward.answer import judgeable
from retool_mcore.reward.equivalence import equivalent
from retool_mcore.reward.normalise import normalise, staged, vote
from tests.reward.generated import FAMILIES, Family, fraction, grouped, pairs, scientific
from tests.reward.neighbours import TRUTHS

PIECES = [r"\frac", r"\sqrt", "{", "}", "(", ")", "1", "23", "x", "+", "-", "^", "_", ",", r"\{", r"\}", "|", "=", "/"]
PIECES += [r"\text{ cm}", r"\cup", r"\le", r"\%", " ", r"\pm", r"\sin", "!", r"\left(", r"\mid", r"\infty", r"\in"]
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@given(seed=SEEDS)
@settings(max_examples=80)
def test_ways_are_equal_exactly_if_their_values_are(family: Family, seed: int):
    for answer, truth, equal in pairs(family, random.Random(seed)):
        assert equivalent(answer, truth) == equal, (answer, truth)
        assert equivalent(truth, answer) == equal, (truth, answer)
        assert judgeable(truth) is None


@pytest.mark.parametrize("family", [scientific, grouped, fraction], ids=lambda family: family.__name__)
@given(seed=SEEDS)
@settings(max_examples=50)
def test_all_ways_of_a_rational_number_are_one_vote(family: Family, seed: int):
    _, ways = family(random.Random(seed))
    plain = [way for way in ways if not normalise(way).percent and "=" not in way]
    assert len({vote(way) for way in plain}) == 1, plain


@given(st.text(alphabet=r"0123456789abcix+-*/^_=<>(){}[]|,.;:!%$\ ~" + "'\n", max_size=60))
@settings(max_examples=400)
def test_no_text_raises_and_every_text_equals_itself(text: str):
    normal = normalise(text)
    assert equivalent(text, f" {text} ") == bool(normal.text)
    assert isinstance(vote(text), str)
    assert (judgeable(text) is None) == (
        normal.number is not None or normal.tree is not None or normal.words is not None
    )


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@settings(max_examples=600)
def test_no_mathematics_raises_and_what_is_read_equals_itself_in_other_spacing(text: str):
    assert equivalent(text, f"{text} ") == bool(normalise(text).text)
    assert not equivalent(text, "7919") and not equivalent("7919", text)


def test_plain_latex_is_read_as_all_stages_read_it():
    draw = random.Random(0)
    texts = [answer for family in FAMILIES for each in range(6) for answer, _, _ in pairs(family, random.Random(each))]
    texts += [way for truth, same, other in TRUTHS for way in (truth, *same, *other)]
    for _ in range(2000):
        text = draw.choice(texts)
        at = draw.randrange(len(text) + 1)
        texts.append(
            text[:at] + draw.choice("0123456789xyzabcdehjkmnost+-^()={}*/,._ |'") + text[at + draw.randrange(2) :]
        )
    assert [text for text in texts if normalise(text) != staged(text)] == []
