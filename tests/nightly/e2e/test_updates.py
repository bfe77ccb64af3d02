"""Several updates a step, in every mode: the rows of each mini-batch and the settings of each
optimizer step. In mode "sync" a run that is resumed repeats the unbroken one bit by bit.

Recorded by update_probe.py in the workers: the model's inputs and the optimizer's settings.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import argv_rl, succeed
from tests.e2e.update_probe import probe, read_updates

pytestmark = [pytest.mark.timeout(600)]

STEPS, WARMUP, LR = 2, 0.25, 1e-4
SIZE = ("train.prompts_per_step=16", "rollout.group_size=4", f"train.steps={STEPS}", "data.max_prompt_tokens=300")
SIZE += ("rollout.max_response_tokens=400", "rollout.protocol=retool", "validation.every=0")
SIZE += ("rollout.record_groups=16", "checkpoint.export=false", "rollout.max_running_requests=16")
OPTIM = (f"optim.lr={LR}", "optim.schedule=cosine", f"optim.warmup_fraction={WARMUP}", "optim.min_lr=1e-6")
OPTIM += ("optim.betas=[0.5, 0.6]", "optim.weight_decay=0.125")


def rate(update: int, updates: int) -> float:
    """Megatron's cosine with warm-up, written out: the rate of ``update`` (1, 2, ...)."""
    warmup = round(WARMUP * updates)
    if update <= warmup:
        return LR * update / warmup
    share = (update - warmup) / (updates - warmup)
    return 1e-6 + (LR - 1e-6) * 0.5 * (1.0 + math.cos(math.pi * share))


# Of a step's row, what two runs have in common to the last bit.
REPEATED = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/rewards/mean", "accuracy")
REPEATED += ("perf/total_num_tokens", "actor/ppo_kl", "actor/pg_clipfrac")


def train(
    root: Path, mark: str, monkeypatch: pytest.MonkeyPatch, *settings: str, name: str = "rl"
) -> list[dict[str, float]]:
    probe(monkeypatch, root / f"{name}_updates")
    task = write_coin_task(root, calls=True, repeat_wrong=50)
    succeed(argv_rl(f"run.root={root}", f"run.name={name}", *task, *SIZE, *OPTIM, *settings), mark, timeout_s=500)
    return read_metrics(root / name / "metrics.jsonl")


def prompts_of(update: list[dict[str, Any]], tokenizer: Any) -> Counter[str]:
    """Problem -> how many of its responses an update was made with, over all ranks."""
    texts = (tokenizer.decode(row) for part in update for row in part["rows"])
    return Counter(text.partition("toss ")[2].partition("?")[0] for text in texts)


@pytest.mark.parametrize(
    ("mode", "devices", "updates"),
    [
        ("sync", ("cluster.gpus_per_node=2",), 4),
        ("partial_rollout", (), 2),
        ("async", ("cluster.gpus_per_node=2", "rollout.gpus=1"), 4),
    ],
)
def test_each_update_learns_from_whole_groups_of_all_lengths_at_its_own_rate(
    *, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, mode: str, devices: tuple[str, ...], updates: int
):
    prompts = 16 // updates
    settings = (f"train.mode={mode}", *devices, f"train.mini_batch_prompts={prompts}", "checkpoint.every_steps=1")
    rows = train(tmp_path, mark, monkeypatch, *settings)
    seen = read_updates(tmp_path / "rl_updates")
    assert len(seen) == STEPS * updates
    ranks = 2 if mode == "sync" else 1
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    for number, update in enumerate(seen, start=1):
        assert len(update) == ranks and {len(part["rows"]) for part in update} == {prompts * 4 // ranks}
        assert set(prompts_of(update, tokenizer).values()) == {4}, "a group is not whole"
        for part in update:
            assert part["betas"] == [0.5, 0.6] and part["weight_decay"] == 0.125
            assert part["lr"] == pytest.approx(rate(number, STEPS * updates), rel=1e-6)
    last_of_step = [rate(step * updates, STEPS * updates) for step in range(1, STEPS + 1)]
    assert [row["actor/lr"] for row in rows] == pytest.approx(last_of_step, rel=1e-6)
    if mode != "async":  # there a batch is one update
        for step in range(1, STEPS + 1):
            of_step = seen[(step - 1) * updates : step * updates]
            assert [set(prompts_of(update, tokenizer)) for update in of_step] == dealt(tmp_path, step, updates)
    if mode == "sync":
        saved = f"checkpoint.resume={tmp_path}/rl/checkpoints/global_step_1"
        again = train(tmp_path, mark, monkeypatch, *settings, saved, name="resumed")
        assert [row["step"] for row in again] == list(range(2, STEPS + 1))
        for before, after in zip(rows[1:], again, strict=True):
            assert {name: after[name] for name in REPEATED} == {name: before[name] for name in REPEATED}
        assert rows_of(read_updates(tmp_path / "resumed_updates")) == rows_of(seen[updates:])


def rows_of(updates: list[list[dict[str, Any]]]) -> list[list[list[list[int]]]]:
    """The token ids of each rank in each update, in their order."""
    return [[part["rows"] for part in sorted(update, key=lambda part: part["rank"])] for update in updates]


def dealt(root: Path, step: int, updates: int) -> list[set[str]]:
    """The problems of each update of a step by the run's seed, whatever the order in which
    responses ended.
    """
    problems: dict[str, str] = {}
    for row in map(json.loads, (root / "rl/trajectories/trajectories.jsonl").open()):
        if row["step"] == step:
            problems[row["key"].rsplit("_", 2)[0]] = row["prompt"].partition("toss ")[2].partition("?")[0]
    assert len(problems) == 16, "every group of the step is recorded"
    names = sorted(problems)
    order = np.random.default_rng((0, step, 0)).permutation(16)
    return [{problems[names[at]] for at in part} for part in np.array_split(order, updates)]
