"""Run by test_verl_bench.py in its own process: verl takes the keys of perf/verl_bench.py, and its
tool agent and ours run the same plan against a real sandbox server; only the engine is scripted.

Prints one JSON object. perf/ has to be on the path.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import verl
from omegaconf import DictConfig, OmegaConf
from scripted import ScriptedAgentLoop, seed_of_row, turn_lengths
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import load_all_tools
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tracking import Tracking
from verl.workers.rollout.replica import TokenOutput
from verl_bench import config_of, hydra_words, read_steps, sandbox_server, verl_keys, write_parts
from verl_parts import compute_score

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.verl.keys.tree import check_ppo_tree
from retool_mcore.verl.trainer import PHASES

ROOT = Path(__file__).parents[3]
ROWS = range(4)  # of the data; a row seeds its plan
TOKEN = 300  # what the scripted engine samples


class Client:
    """verl's LLMServerClient as both loops see it: a turn has the tokens that it was given."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        count = sampling_params["max_new_tokens"]
        self.turns.append({"tokens": count, "ignore_eos": sampling_params.get("ignore_eos"), "after": len(prompt_ids)})
        steps = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=[TOKEN] * count, log_probs=[-1.0] * count, stop_reason="length", extra_fields=steps
        )


def composed(config: RlConfig, folder: Path) -> tuple[DictConfig, DictConfig]:
    """verl's defaults, and its tree with our keys as its command line gives them."""
    path = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with hydra.initialize_config_dir(path, version_base=None):
        defaults = hydra.compose("ppo_trainer")
        return defaults, hydra.compose("ppo_trainer", overrides=hydra_words(verl_keys(config, folder)))


async def trajectory(loop: Any, client: Client, place: dict[str, int]) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    row = {"raw_prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    output = await loop.run(sampling, **row, **place, extra_info={}, uid="u", global_steps=1, held_out=False)
    ids, mask = output.response_ids, output.response_mask
    return {
        "turns": client.turns,
        "mask": mask,
        "logprobs": len(output.response_logprobs),
        "tool": loop.tokenizer.decode([token for token, said in zip(ids, mask, strict=True) if not said]),
        "num_turns": output.num_turns,
    }


async def both(tree: DictConfig, config: RlConfig, tokenizer: Any) -> dict[str, Any]:
    parts = {
        "tokenizer": tokenizer,
        "processor": None,
        "hf_model_type": "qwen2",
        "dataset_cls": RLHFDataset,
        "data_config": DictConfigWrap(tree.data),
    }
    rollout = tree.actor_rollout_ref.rollout
    tools = ToolListWrap(load_all_tools(rollout.multi_turn.tool_config_path, None))
    loops: Any = OmegaConf.load(rollout.agent.agent_loop_config_path)
    [entry] = loops
    assert entry.name == rollout.agent.default_agent_loop
    ours_tree: Any = OmegaConf.create(OmegaConf.to_container(tree))
    ours_tree.trainer.retool_config = str(config.run.config_file)
    found: dict[str, Any] = {"verl": [], "ours": []}
    for row in ROWS:
        place = {"row": row, "session_id": 0}
        client = Client()
        loop = hydra.utils.instantiate(
            entry, trainer_config=DictConfigWrap(tree), server_manager=client, tools=tools, **parts
        )
        draw = random.Random(seed_of_row(config.run.seed, place))
        loop.lengths = turn_lengths(draw, loop.response_length)
        found["verl"].append(await trajectory(loop, client, place))
        client = Client()
        ours = ScriptedAgentLoop(DictConfigWrap(ours_tree), client, **parts)
        found["ours"].append(await trajectory(ours, client, place))
    return found


def logged(folder: Path) -> list[dict[str, float]]:
    """Steps that verl's own file logger wrote, as the bench reads them."""
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "steps.jsonl")
    log = Tracking("retool", "test", ["file"], {})
    log.log({"val/acc": 0.5}, 0)
    seconds = {"gen": 6.0, "old_log_prob": 2.0, "adv": 0.25, "update_actor": 3.0, "update_weights": 0.5, "step": 12.0}
    metrics = {f"timing_s/{name}": np.float64(value) for name, value in seconds.items()}
    log.log(metrics | {"perf/total_num_tokens": np.int64(4800), "training/num_turns/max": np.int32(6)}, 1)
    log.finish()
    return read_steps(folder / "steps.jsonl", num_gpus=2)


def main(folder: Path) -> None:
    tokenizer = build_tokenizer(tokenizer_rows())
    write_model(folder / "model", tokenizer, seed=0)
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}, "data_source": "x"}
    pq.write_table(pa.Table.from_pylist([row] * 16), folder / "rl.parquet")
    model, data = str(folder / "model"), str(folder / "rl.parquet")
    case = config_of("rl_7b_h200x2", model, data, 3)
    defaults, tree = composed(case, folder)
    tree.trainer.device = "cpu"
    check_ppo_tree(tree)
    _, in_fp8 = composed(config_of("rl_7b_fp8_h200x2", model, data, 3), folder)
    unknown = [key for key in verl_keys(case, folder) if OmegaConf.select(defaults, key, default=tree) is tree]
    out: dict[str, Any] = {
        "unknown": unknown,
        "engine": omega_conf_to_dataclass(tree.actor_rollout_ref.actor).engine.strategy,
        "trainer": get_trainer_cls(tree.trainer.v1.trainer_mode).__module__,
        "rollout": OmegaConf.to_container(tree.actor_rollout_ref.rollout, resolve=True),
        "fp8_correction": OmegaConf.to_container(in_fp8.actor_rollout_ref.actor.policy_loss.rollout_correction),
        "fp8_engines": in_fp8.actor_rollout_ref.rollout.quantization,
        "phases": list(PHASES),
        "logged": logged(folder),
    }
    random.seed(0)
    out["scores"] = [compute_score("x", "I do not know", "2") for _ in range(200)]
    own = [f"model.path={model}", f"data.train_file={data}", f"validation.files=[{json.dumps(data)}]"]
    own += ["data.allow_overlap=true", f"run.root={folder}", "rollout.max_response_tokens=800"]
    config = load_config(RlConfig, ROOT / "configs" / "rl_tiny_cpu.toml", own)
    config.run.config_file.parent.mkdir(parents=True, exist_ok=True)
    config.run.config_file.write_text(config.to_toml(), encoding="utf-8")
    with sandbox_server(config) as url:
        write_parts(config, folder, url)
        _, tree = composed(config, folder)
        out |= asyncio.run(both(tree, config, tokenizer))
    print(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
