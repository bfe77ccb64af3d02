"""Run by test_replay.py in its own process: our sampler on verl's queue under Ray.

Prints one JSON object with the result of each scenario.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RolloutError
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.verl.replay import AsyncReplay, SyncReplay, clear_orphans

GROUP = 4
VALIDATION_N = 2


def behavior(calls: int) -> dict[str, Any]:
    return Behavior(
        stop_reason="finished",
        turns=calls + 1,
        calls=calls,
        calls_ok=calls,
        calls_at_limit=0,
        last_call_ok=calls > 0,
        code_lines=calls,
        first_call_tokens=1 if calls else None,
        response_tokens=2,
        model_tokens=2,
        self_corrections=0,
        cut_outputs=0,
        cut_tokens=0,
        engine_s=0.0,
        tool_s=0.0,
    ).to_json()


def put_group(
    uid: str,
    accuracies: list[float | None],
    *,
    recorded: bool = False,
    status: str = "finished",
    scores: dict[int, float] | None = None,
    partition: str = "train",
) -> None:
    """A prompt's trajectories, with shaped rewards ``scores``.

    None is one whose agent loop returned [], as an outage makes it, or raised an exception, and
    then ``status`` is "failure".
    """
    tq.kv_batch_put(keys=[uid], partition_id=partition, tags=[{"is_prompt": True, "status": status, "global_steps": 1}])
    keys, fields = [], []
    for session, accuracy in enumerate(accuracies):
        if accuracy is None:
            continue
        keys.append(f"{uid}_{session}_0")
        extra = {
            "behavior": behavior(calls=int(accuracy)),
            "record": {"turns": [], "truth": "7", "prompt": "six and one?"} if recorded else None,
            "reward_extra_info": {"acc": accuracy} | ({"score": scores[session]} if scores else {}),
            "row": ord(uid[0]) - ord("a"),
        }
        fields.append(
            {
                "prompts": torch.tensor([1, 2, 3]),
                "responses": torch.tensor([4, 5]),
                "response_mask": torch.tensor([1, 1]),
                "rollout_log_probs": torch.tensor([-0.5, -0.25]),
                "rm_scores": torch.tensor([0.0, 2 * accuracy - 1]),
                "old_log_probs": torch.tensor([-0.75, -0.25]),
                "advantages": torch.tensor([2 * accuracy - 1] * 2),
                "extra_fields": extra,
                "num_turns": 3,
            }
        )
    if not keys:
        return
    tags = [{"status": "success", "seq_len": 5} for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)


def sampler(
    folder: Path, max_dropped_fraction: float, refill: Callable[[int], None] | None = None, *, mode: str = "sync"
) -> SyncReplay | AsyncReplay:
    run = load_config(
        RlConfig,
        Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml",
        [
            f"rollout.group_size={GROUP}",
            f"validation.n={VALIDATION_N}",
            f"rollout.max_dropped_fraction={max_dropped_fraction}",
            "rollout.record_groups=2",
            "train.prompts_per_step=2",
            "train.mini_batch_prompts=2",
            f"algorithm.filter_groups={2 if refill and mode == 'sync' else 0}",
        ],
    )
    file = folder / f"{max_dropped_fraction}-{refill is not None}-{mode}.toml"
    file.write_text(run.to_toml(), encoding="utf-8")
    return (SyncReplay if mode == "sync" else AsyncReplay)(
        trainer_mode=mode,
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        refill_fn=refill,
        sampler_kwargs=OmegaConf.create({"run_config": str(file)}),
    )


def sample(replay: SyncReplay | AsyncReplay, partition: str = "train", prompts: int = 2) -> dict[str, Any]:
    answers: list[Any] = []
    replay.observe = answers.extend
    try:
        batch, metrics = replay.sample(global_steps=1, partition_id=partition, batch_size=prompts)
    except RolloutError as error:
        if left := list((tq.kv_list() or {}).get(partition, {})):
            tq.kv_clear(partition_id=partition, keys=left)
        return {"error": str(error)}
    metrics |= replay.step_metrics(batch, metrics)
    metrics.pop(DAPO_FILTERED_REWARD_COUNTS_KEY, None)  # as verl does
    tq.kv_clear(partition_id="train", keys=batch.keys)
    left = sorted((tq.kv_list() or {}).get("train", {}))
    return {"keys": sorted(batch.keys), "metrics": metrics, "left": left, "answers": answers}


def resumed(folder: Path) -> list[list[str]]:
    """What the queue holds after each of two resumes, in which verl saves it within a step."""
    found = []
    for number in range(2):
        put_group(f"t{number}", [1.0, 0.0, 1.0, 0.0])
        put_group("u", [1.0, None, None, None], status="running")
        tq.kv_clear(partition_id="train", keys=[f"t{number}"])  # the step has taken the prompt
        tq.save_checkpoint(str(folder / f"queue{number}"), metadata={"global_steps": number})
        tq.kv_clear(partition_id="train", keys=list((tq.kv_list() or {})["train"]))
        tq.load_checkpoint(str(folder / f"queue{number}"))
        clear_orphans()
        found.append(sorted((tq.kv_list() or {}).get("train", {})))
    return found


def main(folder: Path) -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 100}}}))
    out: dict[str, Any] = {}
    put_group("a", [1.0, 0.0, 1.0, 0.0], recorded=True)
    put_group("b", [0.0, 0.0, 0.0, 0.0])  # its trajectories were not candidates
    out["whole"] = sample(sampler(folder, 0.0))
    put_group("c", [1.0, 0.0, None, 0.0])
    put_group("d", [0.0, 1.0, 1.0, 1.0])
    out["one dropped"] = sample(sampler(folder, 0.2))
    put_group("e", [1.0, None, None, None])
    put_group("f", [0.0, 1.0, 1.0, 1.0])
    out["one of a group left"] = sample(sampler(folder, 0.5))
    put_group("g", [1.0, 0.0, None, 0.0])
    put_group("h", [0.0, 1.0, 1.0, 1.0])
    out["too many"] = sample(sampler(folder, 0.1))
    put_group("x", [1.0, None], partition="val")
    out["too many in validation"] = sample(sampler(folder, 0.4), "val", 1)
    put_group("x", [1.0, 0.0], partition="val")
    put_group("y", [1.0, 1.0], partition="val")
    validating = sampler(folder, 0.0)
    batch, _ = validating.sample(global_steps=1, partition_id="val", batch_size=2)
    out["validation"] = validating.val_metrics
    tq.kv_clear(partition_id="val", keys=batch.keys)
    put_group("y", [0.0, 0.0, 0.0, 0.0], scores={0: -1.0, 1: -0.9, 2: -1.0, 3: -1.0})
    put_group("z", [0.0, 0.0, 0.0, 0.0], scores=dict.fromkeys(range(4), -0.9))
    out["shaped"] = sample(sampler(folder, 0.0))
    for uid in "vw":
        put_group(uid, [None] * 4)
    failing = sampler(folder, 0.1)
    failing.pop_drop_causes = lambda: Counter({"TypeError: wait() got 'initial'": 7, "TypeError: another text": 1})
    out["all failed"] = sample(failing)
    put_group("i", [1.0, 1.0, 1.0, 1.0])
    put_group("j", [0.0, 1.0, 1.0, 1.0])
    asked: list[int] = []

    def refill(count: int) -> None:
        """What the trainer does: as many new prompts as asked for."""
        for _ in range(count):
            asked.append(count)
            put_group(f"k{len(asked)}", [0.0, 0.0, 1.0, 1.0])

    out["filtered"] = {**sample(sampler(folder, 0.0, refill)), "refilled": len(asked)}
    put_group("l", [None, None, None, None])
    put_group("m", [0.0, 1.0, 1.0, 1.0])
    out["filtered, a group empty"] = sample(sampler(folder, 0.5, refill))

    def refill_in_vain(count: int) -> None:
        for _ in range(count):
            asked.append(count)
            put_group(f"n{len(asked)}", [1.0, 1.0, 1.0, 1.0])

    put_group("o", [0.0, 0.0, 0.0, 0.0])
    out["filtered in vain"] = sample(sampler(folder, 0.0, refill_in_vain))

    def refill_with_one_failure(count: int) -> None:
        """The first prompt in the place of one that failed fails, too."""
        if not failures:
            return refill(count)
        return put_group(failures.pop(), [1.0, 0.0, 0.0, None], status="failure")

    for name, max_dropped_fraction in (("failed", 0.375), ("failed too often", 0.25)):
        failures = ["r"]
        put_group("p", [1.0, None, 0.0, 0.0], status="failure")
        put_group("q", [0.0, 1.0, 1.0, None])
        failing = sampler(folder, max_dropped_fraction, refill_with_one_failure, mode="colocate_async")
        out[name] = sample(failing)
        put_group("s", [1.0, 0.0, 1.0, 0.0])
        put_group("t", [1.0, 0.0, 1.0, None])
        out[f"after {name}"] = sample(failing)
    out["resumed"] = resumed(folder)
    print(json.dumps(out))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
