"""What the benchmarks plan and keep, without running one."""

import json
from pathlib import Path

import pytest

PERF = Path(__file__).parents[3] / "perf"


@pytest.mark.parametrize("path", sorted((PERF / "baselines").glob("*.json")), ids=lambda path: path.stem)
def test_a_baselines_rates_mean_what_new_ones_mean(path: Path):
    record = json.loads(path.read_text())
    cluster = record["provenance"]["settings"]["cluster"]
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    for row in record["steps"]:
        # Within 0.2 %: SFT's seconds were once those of the update without timing_s/other.
        assert row["tokens_per_s"] == pytest.approx(row["perf/total_num_tokens"] / row["timing_s/step"], rel=2e-3)
    rates = record["summary"]
    assert rates["perf/throughput"] == pytest.approx(rates["tokens_per_s"] / gpus, rel=1e-4)
