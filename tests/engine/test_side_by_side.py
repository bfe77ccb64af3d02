"""On the real engine: cases of a model that run at the same time have the samples of each alone."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from retool_mcore.config import load_evaluation
from retool_mcore.evaluate.cases import Case, evaluate_many
from retool_mcore.rollout.server import SglangServer

CONFIG = Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml"


def samples(out: Path, name: str) -> dict[tuple[int, int], Any]:
    rows = [json.loads(line) for line in (out / name / "samples.jsonl").read_text().splitlines()]
    return {(row["problem"], row["sample"]): row["response_ids"] for row in rows}


def test_side_by_side_cases_have_the_samples_of_single_ones(server: SglangServer, model_dir: Path, tmp_path: Path):
    config = load_evaluation(CONFIG, ["sandbox.min_level=rlimits", "rollout.max_response_tokens=48"])
    problems = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(6)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = [Case(name="tool", model=str(model_dir)), Case(name="text", model=str(model_dir), tool=False)]
    order: list[str] = []

    def evaluate(out: Path, *cases: Case) -> None:
        evaluate_many(
            config,
            cases,
            data=[problems],
            out=out,
            n=2,
            url=server.url,
            on_sample=lambda name, right: order.append(name),
        )

    evaluate(tmp_path / "both", *cases)
    switches = sum(before != after for before, after in pairwise(order))
    assert switches > 1, f"one case after the other: {order}"
    for case in cases:
        evaluate(tmp_path / "single", case)
        both, single = (samples(tmp_path / out, case.name) for out in ("both", "single"))
        assert len(single) == 12 and both == single
        assert len(set(map(tuple, single.values()))) > 6, "samples that are all alike show nothing"
