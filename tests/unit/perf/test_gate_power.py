"""How often the gate finds a difference in simulated runs, and how often one that is not there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.perf.modules import compare, interleave

RUNS, STEPS, NOISE = 1000, 20, 0.02


def records(draw: np.random.Generator, factor: float, steps: int = STEPS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two runs of the same steps, some of which have four times the tokens of others."""
    tokens = draw.uniform(1000, 4000, steps)
    work_s = tokens**1.3
    pair = []
    for scale in (factor, 1.0):
        times = work_s * scale * np.exp(draw.normal(0, NOISE, steps))
        pair.append(
            {
                "summary": {},
                "steps": [{"perf/total_num_tokens": n, "timing_s/step": s} for n, s in zip(tokens, times, strict=True)],
            }
        )
    return pair[0], pair[1]


def share_of(verdict: str, factor: float, steps: int = STEPS) -> float:
    draw = np.random.default_rng(7)
    verdicts = [
        compare.judge(*compare.ratio_of_times([records(draw, factor, steps)]), compare.DEFAULT_THRESHOLD, "")[0]
        for _ in range(RUNS)
    ]
    return sum(each.startswith(verdict) for each in verdicts) / RUNS


@pytest.mark.parametrize(("steps", "smallest"), [(3, 0.281), (4, 0.131), (8, 0.0526), (20, 0.0296)])
def test_the_smallest_detectable_difference(steps: int, smallest: float):
    """RL's baselines have three: not 3 %, of which three steps find less than one run in ten."""
    pair = records(np.random.default_rng(1), 1.0, steps)
    counted, least = compare.detectable([pair], compare.DEFAULT_THRESHOLD)
    assert counted == steps and least == pytest.approx(smallest, rel=0.005)
    assert share_of("slower", 1 + least, steps) == pytest.approx(0.9, abs=0.03)
    found = share_of("slower", 1.03, steps)
    assert found < 0.1 if steps == 3 else found >= (0.9 if steps >= 20 else 0)
    line = compare.detectable_line([pair], compare.DEFAULT_THRESHOLD)
    assert f"a difference of {least:.1%}" in line and ("not the threshold of 3%" in line) == (steps < 20)


@pytest.mark.parametrize(
    ("slowed", "code"),
    [
        ([], 0),
        ([0], 0),  # one run disturbed
        ([0, 3], 1),  # in both measurements
        ([0, 1, 2, 3], 1),
    ],
)
def test_a_difference_counts_when_it_is_found_twice(slowed: list[int], code: int, capsys: pytest.CaptureFixture[str]):
    draw = np.random.default_rng(5)
    rounds = iter(records(draw, 1.5 if number in slowed else 1.0) for number in range(4))

    def measure() -> Any:
        return [next(rounds), next(rounds)]

    assert interleave.confirm(measure, lambda pairs: interleave.report("case: {:.3f}", pairs, 0.03)) == code
    times = iter(range(4))
    pairs = interleave.alternate(lambda root: {root.name: next(times)}, Path("head"), Path("base"), 2)
    assert pairs == [({"head": 1}, {"base": 0}), ({"head": 2}, {"base": 3})]
    assert len(list(rounds)) == (0 if slowed else 2), "what finds nothing is not measured again"
    output = capsys.readouterr().out
    assert ("found twice: slower" in output) == bool(code) and ("not found again" in output) == (slowed == [0])
