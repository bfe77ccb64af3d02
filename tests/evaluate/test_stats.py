"""The evaluation's estimators are verl's own, on the same samples."""

import json
import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from retool_mcore.evaluate.stats import Samples, interval, pass_at, sizes, summarize
from retool_mcore.platforms.base import get_platform


def made_up(problems: int, k: int, seed: int) -> list[Samples]:
    draw = random.Random(seed)
    rows = []
    for _ in range(problems):
        votes = [draw.choice(["1", "2", "3"]) for _ in range(k)]
        right = draw.choice(["1", "2", "4"])
        rows.append(Samples(scores=[float(vote == right) for vote in votes], votes=votes))
    return rows


SHAPES = [(5, 2), (3, 8), (2, 30)]  # problems, samples of each


@pytest.fixture(scope="module")
def verls() -> dict[tuple[int, int], dict[str, float]]:
    """What verl's own function gives, in a process that has the CPU platform's import stubs."""
    code = """
        import json, sys
        from verl.trainer.ppo.metric_utils import process_validation_metrics
        print(json.dumps([process_validation_metrics(*each)["here"]["acc"] for each in json.load(sys.stdin)]))
    """
    inputs = []
    for problems, k in SHAPES:
        rows = made_up(problems, k, seed=k)
        infos = {
            "acc": [score for row in rows for score in row.scores],
            "pred": [vote for row in rows for vote in row.votes],
        }
        inputs.append((["here"] * problems * k, [str(index) for index in range(problems) for _ in range(k)], infos))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=json.dumps(inputs),
        env={**os.environ, **get_platform("cpu").process_env()},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(SHAPES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("problems", "k"), SHAPES)
def test_mean_best_worst_maj_equal_verls(problems: int, k: int, verls: dict[tuple[int, int], dict[str, float]]):
    theirs = verls[problems, k]
    ours = summarize(made_up(problems, k, seed=k))
    assert ours[f"mean@{k}"] == pytest.approx(theirs[f"mean@{k}"], abs=1e-12)
    for n in sizes(k):
        for name in ("best", "worst", "maj"):
            assert ours[f"{name}@{n}"] == pytest.approx(theirs[f"{name}@{n}/mean"], abs=1e-12)


@pytest.mark.parametrize(("k", "ns"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (30, [2, 4, 8, 16, 30])])
def test_sizes_are_powers_of_two_and_k(k: int, ns: list[int]):
    assert sizes(k) == ns


@pytest.mark.parametrize(
    ("k", "correct", "n", "value"),
    [(4, 0, 2, 0.0), (4, 4, 1, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (10, 3, 5, 11 / 12)],
)
def test_pass_at_counts_draws_without_replacement(k: int, correct: int, n: int, value: float):
    assert pass_at(k, correct, n) == pytest.approx(value)


def test_one_sample_each_gives_its_mean_alone():
    out = summarize([Samples(scores=[1.0], votes=["1"]), Samples(scores=[0.0], votes=[None])])
    assert out["mean@1"] == 0.5
    assert out["pass@1"] == 0.5
    assert not [name for name in out if name.startswith(("best", "maj", "worst"))]


def test_the_interval_holds_the_mean_and_narrows_with_problems():
    few, many = (summarize(made_up(count, 4, seed=1)) for count in (10, 250))
    for out in (few, many):
        assert out["mean@4/low"] <= out["mean@4"] <= out["mean@4/high"]
    assert many["mean@4/high"] - many["mean@4/low"] < few["mean@4/high"] - few["mean@4/low"]


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    draw = random.Random(0)
    covered = 0
    for _ in range(200):
        means = np.array([float(draw.random() < 0.4) for _ in range(100)])
        low, high = interval(means)
        covered += low <= 0.4 <= high
    assert 0.88 <= covered / 200 <= 0.99
