"""Run by test_verl_reward.py in its own process: a run's settings through verl's tree and verl's
own reward manager.

Prints one JSON object: what verl makes of four responses, for each of the settings in its argument.
"""

import asyncio
import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms.base import get_platform
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.keys.tree import ppo_tree

# answer, calls, malformed calls, response tokens; the truth is 34, the longest response 160 tokens
RESPONSES = {
    "right": ("034", 1, {}, 40),
    "right, malformed": ("34", 1, {"json": 1}, 40),
    "wrong, 2 calls": ("35", 2, {}, 40),
    "wrong, 9 calls, long": ("35", 9, {}, 150),
}


def item(tokenizer: Any, answer: str, calls: int, malformed: dict[str, int], tokens: int) -> DataProto:
    """One trajectory as verl's agent loop hands it to the reward manager."""
    ids = tokenizer.encode(f"\\boxed{{{answer}}}", add_special_tokens=False)
    behavior = {"calls": calls, "malformed": malformed, "response_tokens": tokens}
    return DataProto.from_dict(
        tensors={"responses": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)},
        non_tensors={
            "data_source": np.array(["math"], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": "34"}], dtype=object),
            "extra_info": np.array([{"index": 0}], dtype=object),
            "tool_extra_fields": np.array([{"answer": answer, "behavior": behavior}], dtype=object),
        },
    )


async def main(root: str) -> None:
    platform, tokenizer = get_platform("cpu"), build_tokenizer(tokenizer_rows())
    platform.activate()
    out: dict[str, Any] = {}
    for name, overrides in json.loads(sys.argv[1]).items():
        here = [f"run.name={name}", f"run.root={root}"]
        config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [*overrides, *here])
        config.run.dir.mkdir(parents=True)
        write_settings(config)
        manager = load_reward_manager(ppo_tree(config, platform), tokenizer)
        out[name] = {what: await manager.run_single(item(tokenizer, *each)) for what, each in RESPONSES.items()}
    print(json.dumps(out))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
