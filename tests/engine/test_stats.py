"""mean, best, worst and maj agree with verl's."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from retool_mcore.evaluate.stats import sizes, summarize
from retool_mcore.platforms.base import get_platform
from tests.unit.evaluate.test_stats import made_up

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
