"""[reward] of a configuration, as verl reads it and its reward manager calls our function."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.keys.tree import ppo_tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
# answer, calls, malformed calls, response tokens; the truth is 34, the longest response 160 tokens
RESPONSES = [("034", 1, {}, 40), ("34", 1, {"json": 1}, 40), ("35", 2, {}, 40), ("35", 9, {}, 150)]
ALL = ("reward.call_bonus=[0.1, -0.6]", "reward.overlong_buffer_tokens=40", 'reward.require=["format"]')


async def rewards(tokenizer: Any, root: Path, *settings: str) -> tuple[list[float], list[dict[str, Any]]]:
    """Score and extra information of each response, as verl's agent loop hands it over."""
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [*settings, f"run.root={root}"])
    config.run.dir.mkdir()
    write_settings(config)
    manager = load_reward_manager(ppo_tree(config, get_platform("cpu")), tokenizer)
    found = []
    for answer, calls, malformed, tokens in RESPONSES:
        ids = tokenizer.encode(f"\\boxed{{{answer}}}", add_special_tokens=False)
        behavior = {"calls": calls, "malformed": malformed, "response_tokens": tokens}
        columns = {
            "data_source": "math",
            "reward_model": {"style": "rule", "ground_truth": "34"},
            "extra_info": {"index": 0},
            "tool_extra_fields": {"answer": answer, "behavior": behavior},
        }
        item = DataProto.from_dict(
            tensors={"responses": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)},
            non_tensors={name: np.array([value], dtype=object) for name, value in columns.items()},
        )
        found.append(await manager.run_single(item))
    infos = [each["reward_extra_info"] for each in found]
    assert [info["acc"] for info in infos] == [1.0, 1.0, 0.0, 0.0], "the answer's verdict stays"
    return [each["reward_score"] for each in found], infos


async def test_all_options_add_up(tokenizer: Any, tmp_path: Path):
    # 150 tokens are 30 into the last 40 of 160; a malformed call makes a right answer worth a wrong
    # one with its bonus
    scores, infos = await rewards(tokenizer, tmp_path, *ALL)
    assert scores == pytest.approx([1.0, -0.9, -0.8, -0.6 - 0.75])
    assert [info["format_ok"] for info in infos] == [1.0, 0.0, 1.0, 1.0]
    parts = ("reward_answer", "reward_calls", "reward_overlong")
    assert [sum(info[part] for part in parts) for info in infos] == pytest.approx(scores)


async def test_a_function_of_ones_own_scores_in_place_of_ours_and_its_parts_are_kept(tokenizer: Any, tmp_path: Path):
    scores, infos = await rewards(tokenizer, tmp_path, "reward.function=configs.examples.reward:score")
    assert scores == [0.75, 0.75, -1.0, -1.0], "its example takes a quarter where no call ran"
    assert [info["reward_answer_part"] for info in infos] == [1.0, 1.0, -1.0, -1.0]
    assert [info["reward_unsure"] for info in infos] == [-0.25, -0.25, 0.0, 0.0]
