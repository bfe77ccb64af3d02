"""What a worker's host does for each response of an update, beside the model.

    python perf/worker_bench.py                      # the columns that an actor asks for
    python perf/worker_bench.py --everything         # all that the queue has of a row

One JSON line: CPU microseconds a response of each part, the least of several rounds. The parts are
the queue's answer (packed, unpacked and made to columns), the cut into micro-batches, their way to
the device (here: the copy of each micro-batch's dictionary), the loss with its gradient, and the
join of the outputs. The model and waits for a device are left out; on a GPU the loops also wait.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import torch
import typer

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms.base import get_platform

app = typer.Typer(pretty_exceptions_enable=False)
CONFIG = "configs/rl_tiny_cpu.toml"
ROUNDS = 7


def stored_rows(count: int, mean: int) -> list[dict[str, Any]]:
    """What the queue has of responses with ``mean`` tokens, as the agent loop stores them."""
    drawn, plain = torch.Generator().manual_seed(0), random.Random(0)
    rows = []
    for number in range(count):
        length = min(4 * mean, max(20, int(plain.lognormvariate(0, 0.5) * mean)))
        prompt, response = (torch.randint(0, 500, (size,), generator=drawn) for size in (60 + number % 20, length))
        mask = (torch.rand(length, generator=drawn) < 0.8).long()
        mask[0] = 1
        said = -torch.rand(length, generator=drawn)
        tokens = {
            "prompts": prompt, "responses": response, "input_ids": torch.cat([prompt, response]),
            "position_ids": torch.arange(len(prompt) + length), "response_mask": mask, "loss_mask": mask,
            "rollout_log_probs": said, "old_log_probs": said, "rm_scores": torch.zeros(length),
            "advantages": torch.randn((), generator=drawn).expand(length).contiguous(),
        }  # fmt: skip
        told = {
            "uid": f"u{number // 16}", "session_id": number % 16, "index": number, "row": number, "held_out": False,
            "raw_prompt": [{"role": "user", "content": "What is 412 + 967? " * 16}], "data_source": "math",
            "reward_model": {"ground_truth": "1379"}, "extra_info": {"index": number}, "num_turns": 3,
            "metrics": {"generate_sequences": 1.0, "tool_calls": 0.2}, "global_steps": 1, "multi_modal_inputs": {},
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8), "agent_name": "retool",
            "extra_fields": {
                "answer": "1379", "min_global_steps": 0, "max_global_steps": 0, "record": None, "row": number,
                "behavior": {"calls": 2, "lines": [3, 4]}, "reward_extra_info": {"acc": 1.0},
            },
        }  # fmt: skip
        rows.append(tokens | told)
    return rows


def fetched(rows: list[dict[str, Any]], names: list[str]) -> Any:
    """The queue's answer, as its storage packs it and its client makes columns of it."""
    from tensordict import TensorDict
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from transfer_queue.utils.serial_utils import decode, encode

    data = {name: [row[name] for row in rows] for name in names}
    came = decode(encode({"data": data}))["data"]
    pack = AsyncSimpleStorageManager._pack_field_values
    return TensorDict({name: pack(values) for name, values in came.items()}, batch_size=len(rows))


class Update:
    """One update of ``rows`` on the host; ``parts`` has the CPU seconds of each part."""

    def __init__(self, config: RlConfig, rows: list[dict[str, Any]], names: list[str]) -> None:
        from verl.utils.config import omega_conf_to_dataclass

        from retool_mcore.verl.keys.ppo import ppo_tree

        self.rows, self.names, self.budget = rows, names, config.train.micro_batch_tokens
        self.loss_config: Any = omega_conf_to_dataclass(ppo_tree(config, get_platform("cpu")).actor_rollout_ref.actor)

    def run(self) -> dict[str, float]:
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.megatron import transformer_impl
        from verl.workers.utils import losses

        from retool_mcore.platforms.packing import send_batch

        engine: Any = transformer_impl  # its names are patched there
        parts: dict[str, float] = {}

        def timed(name: str, part: Callable[[], Any]) -> Any:
            began = time.process_time()
            made = part()
            parts[name] = parts.get(name, 0.0) + time.process_time() - began
            return made

        data = timed("fetch", lambda: fetched(self.rows, self.names))
        size, tokens = len(self.rows), int(data["loss_mask"].values().sum())
        told = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": size, "use_dynamic_bsz": True}
        tu.assign_non_tensor(data, max_token_len_per_gpu=self.budget, temperature=1.0, **told)

        def cut() -> Any:
            (whole,) = tu.make_iterator(data, mini_batch_size=size, epochs=1, seed=0)
            return engine.prepare_micro_batches(data=whole)

        micro_batches, indices = timed("cut", cut)
        outputs = []
        for each in micro_batches:
            sent = timed("send", lambda each=each: send_batch(each, torch.device("cpu")).to("cpu"))
            said = torch.nested.nested_tensor_from_jagged(
                torch.zeros(len(sent["input_ids"].values()), requires_grad=True), sent["input_ids"].offsets()
            )

            def learn(sent: Any = sent, said: Any = said) -> Any:
                loss, metrics = losses.ppo_loss(self.loss_config, {"log_probs": said}, sent)
                loss.backward()
                return {"model_output": {"log_probs": said.detach()}, "loss": float(loss), "metrics": metrics}

            outputs.append(timed("loss", learn))
        summary = {"output_lst": outputs, "indices": indices, "data": data}
        timed("join", lambda: engine.postprocess_batch_func(**summary))
        return parts


def actors_columns() -> list[str]:
    from retool_mcore.verl.unpadded import ACTOR

    return list(ACTOR)


@app.command()
def main(
    responses: Annotated[int, typer.Option(help="of the update")] = 512,
    mean: Annotated[int, typer.Option(help="tokens of a response")] = 250,
    everything: Annotated[bool, typer.Option(help="fetch all columns")] = False,
) -> None:
    """Measure one update again and again, and tell the least of each part."""
    get_platform("cpu").activate()
    from retool_mcore.verl.plugin import assert_loaded

    assert_loaded()
    import_module("retool_mcore.platforms.cpu.engine")  # applies the patches that a worker has
    torch.set_num_threads(1)
    rows = stored_rows(responses, mean)
    names = [name for name in rows[0] if everything or name in actors_columns()]
    settings = ["rollout.max_response_tokens=8192", "train.micro_batch_tokens=24576"]
    update = Update(load_config(RlConfig, CONFIG, settings), rows, names)
    rounds = [update.run() for _ in range(ROUNDS)]
    least = {name: 1e6 * min(each[name] for each in rounds) / responses for name in rounds[0]}
    told = {f"{name}_us": round(value, 1) for name, value in least.items()}
    typer.echo(json.dumps({"columns": len(names), **told, "us_a_response": round(sum(least.values()), 1)}))


if __name__ == "__main__":
    app()
