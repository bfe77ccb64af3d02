"""The evaluation's estimators on small samples; tests/engine/test_evaluation.py has verl's."""

import random

import numpy as np
import pytest

from retool_mcore.evaluate.stats import Samples, interval, pass_at, summarize


def made_up(problems: int, k: int, seed: int) -> list[Samples]:
    draw = random.Random(seed)
    rows = []
    for _ in range(problems):
        votes = [draw.choice(["1", "2", "3"]) for _ in range(k)]
        right = draw.choice(["1", "2", "4"])
        rows.append(Samples(scores=[float(vote == right) for vote in votes], votes=votes))
    return rows


@pytest.mark.parametrize(("k", "correct", "n", "value"), [(4, 0, 2, 0.0), (4, 1, 2, 0.5), (10, 3, 5, 11 / 12)])
def test_pass_at_counts_draws_without_replacement(k: int, correct: int, n: int, value: float):
    assert pass_at(k, correct, n) == pytest.approx(value)


def test_equal_rates_have_wilsons_interval_of_their_number_of_problems():
    out = summarize([Samples(scores=[1.0, 1.0], votes=["1", "1"])] * 4)
    for name in ("mean@2", "best@2", "pass@1"):  # statsmodels' proportion_confint(4, 4, method="wilson")
        assert (out[f"{name}/low"], out[f"{name}/high"]) == pytest.approx((0.5101092, 1.0))
    out = summarize([Samples(scores=[0.0, 0.0], votes=["1", "1"])] * 4)
    assert (out["mean@2/low"], out["mean@2/high"]) == pytest.approx((0.0, 1 - 0.5101092))


def test_an_interval_has_95_percent_of_the_resampled_means():
    """30 of 100 are right: 1.96 standard errors are 0.09."""
    assert interval(np.array([1.0] * 30 + [0.0] * 70)) == pytest.approx((0.21, 0.39), abs=0.004)


def test_one_sample_each_gives_its_mean_alone():
    out = summarize([Samples(scores=[1.0], votes=["1"]), Samples(scores=[0.0], votes=[None])])
    assert (out["mean@1"], out["pass@1"]) == (0.5, 0.5)
    assert not [name for name in out if name.startswith(("best", "maj", "worst"))]
