"""What a seed fixes: the same run samples the same twice, and `retool eval` samples what validation
sampled.

In `make test` what both ask is compared without engines: the rows in verl/test_dataset.py, the
seeds and the sampling in verl/test_agent_loop.py, verl/test_verl_worker.py and
evaluate/test_run.py. That a seed fixes a response is in platforms/test_sglang.py.

The training file is one of verl's tool examples: with the column that asks for a loop of verl's,
which must not run.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from retool_mcore.data.files import read_rows, write_parquet
from tests.e2e.coin_model import write_coin_task
from tests.e2e.commands import argv_retool, argv_rl, run, succeed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Samples = dict[str, list[str]]  # prompt -> its responses in order of their sessions


def as_verl_writes_them(folder: Path) -> None:
    """The coin's rows in the layouts of verl's gsm8k_tool_agent_loop.py and, of a second held-out
    file, of DAPO.
    """
    rows = [row for _, row in read_rows(folder / "train.parquet", ("prompt", "reward_model"))]
    tool = [
        {
            "data_source": "openai/gsm8k",
            "agent_name": "tool_agent",
            "prompt": [{"role": "system", "content": "You are a math expert."}, *row["prompt"]],
            "ability": "math",
            "reward_model": row["reward_model"],
            "output": "a name that verl's worker uses itself",
            "extra_info": {
                "split": "train",
                "index": index,
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}},
                "interaction_kwargs": {"query": "Heads?", "ground_truth": "1"},
            },
        }
        for index, row in enumerate(rows)
    ]
    write_parquet(folder / "train.parquet", tool)
    more = [{"role": "user", "content": "Heads or tails, one more toss?"}]
    write_parquet(
        folder / "dapo.parquet",
        [{"data_source": "math_dapo", "prompt": more, "reward_model": {"style": "rule", "ground_truth": "1"}}],
    )


def train(root: Path, mark: str, *settings: str) -> str:
    """A run of one step; returns what the terminal said."""
    done = run(argv_rl(f"run.root={root}", *settings), mark, timeout_s=500)
    logs = [path.read_text(errors="replace")[-5000:] for path in root.glob("*/logs/rl.log")]
    assert done.returncode == 0, done.stderr[-3000:] + "".join(logs)
    return done.stderr


def samples(folder: Path) -> Samples:
    """What verl wrote down of a batch."""
    [path] = folder.glob("*.jsonl")
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for row in map(json.loads, path.open()):
        found[row["input"]][int(row["uid"].rsplit("_", 2)[1])] = row["output"]
    return in_order(found)


def in_order(found: dict[str, dict[int, str]]) -> Samples:
    return {prompt: [said for _, said in sorted(each.items())] for prompt, each in found.items()}


def settings(root: Path) -> tuple[str, ...]:
    model, train_file, _ = write_coin_task(root, calls=True)
    as_verl_writes_them(root)
    held_out = json.dumps([f"{root}/val.parquet", f"{root}/dapo.parquet"])
    files = (model, train_file, f"validation.files={held_out}", "validation.n=6", "validation.top_p=0.95")
    size = ("train.prompts_per_step=8", "train.mini_batch_prompts=8", "rollout.group_size=4", "train.steps=1")
    limits = ("rollout.protocol=retool", "data.max_prompt_tokens=300", "rollout.max_response_tokens=60")
    return (*files, *size, *limits, "checkpoint.every_steps=0", "checkpoint.export=false", "run.seed=3")


def dumped(root: Path, kind: str, name: str) -> str:
    return f"verl_overrides.trainer.{kind}_data_dir={root}/{name}"


@pytest.mark.long
def test_eval_answers_as_validation_did(tmp_path: Path, mark: str):
    common = settings(tmp_path)
    more = ("run.name=first", "validation.every=1", "checkpoint.export=true", "checkpoint.every_steps=1")
    said = train(tmp_path, mark, *common, *more, dumped(tmp_path, "validation", "v"))
    assert said.count("train.parquet: its column agent_name (tool_agent) is ignored") == 1
    log = (tmp_path / "first/logs/rl.log").read_text(errors="replace")
    assert log.count("its column agent_name (tool_agent) is ignored") == 1
    validated = samples(tmp_path / "v")
    assert len(validated) == 3 and all(len(each) == 6 for each in validated.values()), "three problems of two files"
    assert evaluate(tmp_path, mark, *common) == validated
    assert len({answer for each in validated.values() for answer in each}) > 1


@pytest.mark.long
def test_a_seed_fixes_the_first_batch(tmp_path: Path, mark: str):
    common = (*settings(tmp_path), "validation.every=0")
    for name in ("first", "again"):
        train(tmp_path, mark, *common, f"run.name={name}", dumped(tmp_path, "rollout", f"samples_{name}"))
    batch = samples(tmp_path / "samples_first")
    assert len(batch) == 8 and all(len(each) == 4 for each in batch.values())
    assert batch == samples(tmp_path / "samples_again")
    assert len({answer for each in batch.values() for answer in each}) > 3, "the coin is tossed"
    assert any(len(set(each)) > 1 for each in batch.values()), "samples of one prompt differ"


def evaluate(root: Path, mark: str, *settings: str) -> Samples:
    """What `retool eval` samples on the run's export."""
    config = ("eval", "configs/rl_tiny_cpu.toml", *settings, "--model", f"{root}/first/export", "--out", f"{root}/eval")
    succeed(argv_retool(*config), mark, timeout_s=500)
    tokenizer = AutoTokenizer.from_pretrained(root / "first" / "export")
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for row in map(json.loads, (root / "eval/first/samples.jsonl").open()):
        prompt, said = (
            tokenizer.decode(row[f"{name}_ids"], skip_special_tokens=True) for name in ("prompt", "response")
        )
        found[prompt][row["sample"]] = said
    return in_order(found)
