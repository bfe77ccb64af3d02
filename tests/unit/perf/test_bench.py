"""What the benchmarks plan and keep, without running one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[3] / "perf"


def test_a_summary_takes_the_rates_that_the_rows_have():
    row = {"time_step_s": 2.0, "tokens": 800.0, "tokens_per_s": 400.0, "tokens_per_s_per_gpu": 100.0}
    script = (
        f"import sys, json; sys.path.insert(0, {str(PERF)!r})\n"
        f"from bench import summarize\nprint(json.dumps(summarize([{row!r}] * 3)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    rates = {"tokens_per_s": 400.0, "tokens_per_s_per_gpu": 100.0}
    assert json.loads(done.stdout) == {**rates, "time_step_s": 2.0, "peak_gib_by_rank": {}}


@pytest.mark.parametrize("path", sorted((PERF / "baselines").glob("*.json")), ids=lambda path: path.stem)
def test_a_baselines_rates_mean_what_new_ones_mean(path: Path):
    record = json.loads(path.read_text())
    cluster = record["provenance"]["settings"]["cluster"]
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    for row in record["steps"]:
        # Within 0.2 %: SFT's seconds were once those of the update without time_other_s.
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["time_step_s"], rel=2e-3)
    rates = record["summary"]
    assert rates["tokens_per_s_per_gpu"] == pytest.approx(rates["tokens_per_s"] / gpus, rel=1e-4)
