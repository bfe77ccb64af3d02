"""Run by test_agent_loop.py in its own process: verl instantiates our loop and runs it; only verl's
server is scripted.

Prints one JSON object: what verl would store of each trajectory.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from retool_mcore.config import RlConfig, load_config
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.run import heartbeat
from retool_mcore.verl.agent_loop import LoopWorker
from retool_mcore.verl.reward import compute_score
from tests.unit.rollout.scripted_engine import ABORT, ScriptedEngine, call

SEEDED: dict[str, dict[str, Any]] = {
    "next step": {"global_steps": 3},
    "next sample": {"session_id": 1},
    "next row": {"row": 5},
    "held out": {"held_out": True},
    "held out, later": {"held_out": True, "global_steps": 3},
    "vllm": {"engine": "vllm"},
}
ANSWER = "It is \\boxed{1379}.<|im_end|>"


class Client:
    """verl's LLMServerClient, as the loop sees it: SGLang's answers in verl's form.

    ``routes``: with the experts of one layer, [position, version of the weights].
    """

    def __init__(self, tokenizer: Any, script: list[str], dies: bool = False, routes: bool = False) -> None:
        self.engine, self.dies, self.params = ScriptedEngine(tokenizer, script), dies, []
        self.routes = routes

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.params.append(dict(sampling_params))
        if self.dies:
            raise ActorDiedError()
        turn = await self.engine.answer(request_id, prompt_ids, sampling_params)
        version = 3 + turn.version  # one more after each abort
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), version)
        steps["num_cached_tokens"] = 16
        known = len(prompt_ids) + len(turn.token_ids) - 1
        return TokenOutput(
            token_ids=list(turn.token_ids),
            log_probs=list(turn.logprobs),
            routed_experts=np.array([[[p, turn.version]] for p in range(known)], np.int32) if self.routes else None,
            stop_reason=turn.stop,
            extra_fields=steps,
        )


def written(config: RlConfig) -> Path:
    """The settings as a run's folder has them, which is where the loop reads them."""
    config.run.config_file.parent.mkdir(parents=True, exist_ok=True)
    config.run.config_file.write_text(config.to_toml(), encoding="utf-8")
    return config.run.config_file


async def run(
    client: Client, tokenizer: Any, config: RlConfig, content: str = "412 + 967?", engine: str = "sglang", **row: Any
) -> Any:
    trainer = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": engine}}, "data": {}})
    loop = hydra.utils.instantiate(
        {
            "name": "retool",
            "_target_": "retool_mcore.verl.agent_loop.ReToolAgentLoop",
            "run_config": str(written(config)),
        },
        trainer_config=DictConfigWrap(config=trainer),
        server_manager=client,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen2",
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(OmegaConf.create({})),
        tools=ToolListWrap([]),
    )
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    row = {"row": 4, "held_out": False, "global_steps": 2, "session_id": 0, "uid": "u", **row}
    row = {"reward_model": {"ground_truth": "1379"}, **row, "raw_prompt": [{"role": "user", "content": content}]}
    output = await loop.run(sampling, **row)
    if isinstance(output, list):
        return output
    stored = output.as_dict()
    columns = ("prompts", "responses", "response_mask", "rollout_log_probs")
    return {name: stored[name].tolist() for name in columns} | {
        "num_turns": stored["num_turns"],
        "extra_fields": stored["extra_fields"],
        "params": client.params,
        "metrics": output.metrics.model_dump(),
        "routes": stored["routed_experts"].tolist() if "routed_experts" in stored else None,
    }


async def submit(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """A trajectory in the example's environment, and the reward that verl would compute of it."""
    file = Path(__file__).parents[2] / "configs/examples/rl_unit_tests_cpu.toml"
    config = load_config(RlConfig, file, [f"run.root={folder}", "rollout.max_response_tokens=400"])
    truth = json.dumps({"function": "f", "cases": [[[3], 10], [[5], 17]]})
    arguments = {"name": "submit", "arguments": {"code": "f = lambda x: 3 * x + 1"}}
    client = Client(tokenizer, [f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>", "It is submitted.<|im_end|>"])
    output = await run(client, tokenizer, config, reward_model={"ground_truth": truth}, data_source="unit_tests")
    extra = output["extra_fields"]
    return extra["behavior"] | compute_score("unit_tests", "", truth, extra, run_config=str(written(config)))


async def main(folder: Path) -> None:
    """Runs of one configuration follow each other, because a process keeps one sandbox."""
    tokenizer = build_tokenizer(tokenizer_rows())
    tokenizer.name_or_path = "tiny"
    file = Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml"
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    own = [f"run.root={folder}", "rollout.max_response_tokens=160", "data.max_prompt_tokens=160"]
    own += ["train.prompts_per_step=8", "train.mini_batch_prompts=8"]
    own += [f"sandbox.python={environment}/bin/python", 'sandbox.preload=["wave"]']
    tool = load_config(RlConfig, file, own)
    turns = ["I add.\n" + call("print(412 + 967)"), ANSWER]
    out: dict[str, Any] = {"tool": await run(Client(tokenizer, turns), tokenizer, tool)}
    out["alive"] = (tool.run.dir / heartbeat.FILE).exists()
    out["dropped"] = await run(Client(tokenizer, turns, dies=True), tokenizer, tool)
    pop: Any = LoopWorker.pop_drop_causes
    out["causes"] = [list(await pop(None)) for _ in range(2)]
    try:
        await run(Client(tokenizer, turns), tokenizer, tool, content="9" * 500)
    except ValueError as error:
        out["long"] = f"{type(error).__name__}: {error}"
    for name, row in SEEDED.items():
        out[name] = await run(Client(tokenizer, turns), tokenizer, tool, **row)
    out["no router replay"] = await run(Client(tokenizer, turns, routes=True), tokenizer, tool)
    asks = "import sys\nprint('environment' in sys.prefix, 'wave' in sys.modules)"
    out["interpreter"] = await run(Client(tokenizer, [call(asks), ANSWER]), tokenizer, tool)
    replayed = load_config(RlConfig, file, [*own, "run.name=r3", "algorithm.router_replay=R3"])
    aborted = [turns[0].replace("<tool", f"{ABORT}<tool"), ABORT + ANSWER[:6] + ABORT + ANSWER[6:]]
    out["routes"] = await run(Client(tokenizer, aborted, routes=True), tokenizer, replayed)
    dated = load_config(RlConfig, file, [*own, "run.name=dated", "rollout.tools=[]", "rollout.record_groups=0"])
    written(dated)
    (dated.run.dir / FORMAT_FILE).write_text('{"date": "2024-02-03"}')
    calendar = build_tokenizer(tokenizer_rows())
    calendar.chat_template = f'{{{{ strftime_now("%d %b %Y") }}}}{calendar.chat_template}'
    out["text"] = await run(Client(calendar, [call("print(1)") + ANSWER]), calendar, dated)
    out["dated"] = calendar.decode(out["text"]["prompts"])
    out["submitted"] = await submit(folder, tokenizer)
    out["turns"] = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    print(json.dumps(out))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
