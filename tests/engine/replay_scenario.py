"""Run by test_replay.py in its own process: our sampler on verl's queue under Ray.

Prints one JSON object with the result of each scenario.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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

Replay = SyncReplay | AsyncReplay
SETTINGS = ("rollout.group_size=4", "validation.n=2", "rollout.record_groups=2")
SETTINGS += ("train.prompts_per_step=2", "train.mini_batch_prompts=2")
NOTHING = dict.fromkeys(("calls_at_limit", "self_corrections", "cut_outputs", "cut_tokens", "engine_s", "tool_s"), 0)


def behavior(calls: int) -> dict[str, Any]:
    return Behavior(
        stop_reason="finished",
        turns=calls + 1,
        calls=calls,
        calls_ok=calls,
        last_call_ok=calls > 0,
        code_lines=calls,
        first_call_tokens=1 if calls else None,
        response_tokens=2,
        model_tokens=2,
        **NOTHING,  # type: ignore[arg-type]
    ).to_json()


def put(
    uid: str,
    accuracies: Sequence[float | None],
    *,
    status: str = "finished",
    scores: Sequence[float] = (),
    partition: str = "train",
) -> None:
    """A prompt's trajectories, with shaped rewards ``scores``. Those of "a" are recorded.

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
            "record": {"turns": [], "truth": "7", "prompt": "six and one?"} if uid == "a" else None,
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
    if keys:
        tags = [{"status": "success", "seq_len": 5} for _ in keys]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)


def left(partition: str = "train") -> list[str]:
    """What the queue holds."""
    return sorted((tq.kv_list() or {}).get(partition, {}))


def sampler(
    folder: Path, max_dropped_fraction: float, refill: Callable[[int], None] | None = None, *, mode: str = "sync"
) -> Replay:
    own = [f"rollout.max_dropped_fraction={max_dropped_fraction}"]
    own += [f"algorithm.filter_groups={2 if refill and mode == 'sync' else 0}"]
    run = load_config(RlConfig, Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml", [*SETTINGS, *own])
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


def sample(replay: Replay, partition: str = "train", **groups: Sequence[float | None]) -> dict[str, Any]:
    """What a step gets that finds ``groups`` in the queue; or a validation, of one prompt."""
    for uid, accuracies in groups.items():
        put(uid, accuracies, partition=partition)
    answers: list[Any] = []
    replay.observe = answers.extend
    prompts = 2 if partition == "train" else len(groups)
    try:
        batch, metrics = replay.sample(global_steps=1, partition_id=partition, batch_size=prompts)
    except RolloutError as error:
        if keys := left(partition):
            tq.kv_clear(partition_id=partition, keys=keys)
        return {"error": str(error)}
    if partition == "train":
        metrics |= replay.step_metrics(batch, metrics)
        metrics.pop(DAPO_FILTERED_REWARD_COUNTS_KEY, None)  # as verl does
    else:
        metrics = replay.val_metrics
    tq.kv_clear(partition_id=partition, keys=batch.keys)
    return {"keys": sorted(batch.keys), "metrics": metrics, "left": left(), "answers": answers}


def resumed(folder: Path) -> list[list[str]]:
    """What the queue holds after each of two resumes, in which verl saves it within a step."""
    found = []
    for number in range(2):
        put(f"t{number}", [1.0, 0.0, 1.0, 0.0])
        put("u", [1.0, None, None, None], status="running")
        tq.kv_clear(partition_id="train", keys=[f"t{number}"])  # the step has taken the prompt
        tq.save_checkpoint(str(folder / f"queue{number}"), metadata={"global_steps": number})
        tq.kv_clear(partition_id="train", keys=left())
        tq.load_checkpoint(str(folder / f"queue{number}"))
        clear_orphans()
        found.append(left())
    return found


def main(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    out["whole"] = sample(sampler(folder, 0.0), a=[1.0, 0.0, 1.0, 0.0], b=[0.0, 0.0, 0.0, 0.0])
    out["one dropped"] = sample(sampler(folder, 0.2), c=[1.0, 0.0, None, 0.0], d=[0.0, 1.0, 1.0, 1.0])
    out["one of a group left"] = sample(sampler(folder, 0.5), e=[1.0, None, None, None], f=[0.0, 1.0, 1.0, 1.0])
    out["too many"] = sample(sampler(folder, 0.1), g=[1.0, 0.0, None, 0.0], h=[0.0, 1.0, 1.0, 1.0])
    out["too many in validation"] = sample(sampler(folder, 0.4), "val", x=[1.0, None])
    out["validation"] = sample(sampler(folder, 0.0), "val", x=[1.0, 0.0], y=[1.0, 1.0])
    put("y", [0.0, 0.0, 0.0, 0.0], scores=[-1.0, -0.9, -1.0, -1.0])
    put("z", [0.0, 0.0, 0.0, 0.0], scores=[-0.9] * 4)
    out["shaped"] = sample(sampler(folder, 0.0))
    failing = sampler(folder, 0.1)
    failing.pop_drop_causes = lambda: Counter({"TypeError: wait() got 'initial'": 7, "TypeError: another text": 1})
    out["all failed"] = sample(failing, v=[None] * 4, w=[None] * 4)
    asked: list[int] = []

    def refill(count: int, accuracies: Sequence[float] = (0.0, 0.0, 1.0, 1.0)) -> None:
        """What the trainer does: as many new prompts as asked for."""
        for _ in range(count):
            asked.append(count)
            put(f"k{len(asked)}", accuracies)

    out["filtered"] = sample(sampler(folder, 0.0, refill), i=[1.0, 1.0, 1.0, 1.0], j=[0.0, 1.0, 1.0, 1.0])
    out["filtered"]["refilled"] = len(asked)
    out["filtered, a group empty"] = sample(sampler(folder, 0.5, refill), l=[None] * 4, m=[0.0, 1.0, 1.0, 1.0])
    in_vain = sampler(folder, 0.0, lambda count: refill(count, (1.0, 1.0, 1.0, 1.0)))
    out["filtered in vain"] = sample(in_vain, o=[0.0, 0.0, 0.0, 0.0])

    def refill_with_one_failure(count: int) -> None:
        """The first prompt in the place of one that failed fails, too."""
        if not failures:
            return refill(count)
        return put(failures.pop(), [1.0, 0.0, 0.0, None], status="failure")

    for name, max_dropped_fraction in (("failed", 0.375), ("failed too often", 0.25)):
        failures = ["r"]
        put("p", [1.0, None, 0.0, 0.0], status="failure")
        failing = sampler(folder, max_dropped_fraction, refill_with_one_failure, mode="colocate_async")
        out[name] = sample(failing, q=[0.0, 1.0, 1.0, None])
        out[f"after {name}"] = sample(failing, s=[1.0, 0.0, 1.0, 0.0], t=[1.0, 0.0, 1.0, None])
    out["resumed"] = resumed(folder)
    return out


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 100}}}))
    found = main(Path(sys.argv[1]))
    ray.shutdown()
    print(json.dumps(found))
