"""Every number that a row of metrics may have: its name, its unit and its meaning.

A number has one name: verl's where verl has one. ``*`` stands for a part that differs. RL writes
only these of what verl reports; docs/metrics.md is made from this table.
"""

import re
from collections.abc import Mapping
from functools import cache

METRICS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Learning in RL": {
        "critic/rewards/mean": ("reward", "mean reward of the step's trajectories, with reward.shaping and KL penalty"),
        "critic/score/mean": ("reward", "the same without a KL penalty; only where algorithm.kl_in is 'reward'"),
        "critic/advantages/*": ("", "max and min of the advantages"),
        "accuracy": ("share", "right answers, whatever the reward is"),
        "reward/*": ("", "mean of each part of the reward; has_answer and check_failed are shares"),
        "actor/pg_loss": ("advantage", "algorithm.loss, without kl_coef; do not read progress from it"),
        "actor/grad_norm": ("", "before clipping, mean over the step's updates"),
        "actor/lr": ("", "learning rate of the step's last update"),
        "actor/entropy": (
            "nats a token",
            "of the actor at the step's start; with algorithm.old_log_prob = 'rollout' the mean of -log p",
        ),
        "actor/kl_loss": ("nats a token", "KL to the reference, where it is in the loss"),
        "actor/kl_coef": ("", "its coefficient"),
        "actor/reward_kl_penalty*": ("nats", "KL to the reference, where it is in the reward; and its coefficient"),
        "actor/ppo_kl": ("nats", "mean of log p_old - log p over the loss_tokens of all updates"),
        "actor/pg_clipfrac*": ("share", "tokens that clip, or clip_c (lower), keeps from learning"),
        "critic/vf_*": ("", "the critic's loss, clip fraction and explained variance"),
        "critic/grad_norm": ("", "the critic's, before clipping"),
        "critic/lr": ("", "the critic's learning rate"),
        "loss_tokens": ("tokens", "tokens that the loss is taken on, without what is masked or rejected"),
        "loss/masked_fraction": ("share", "responses without a token in the loss, by algorithm.mask"),
        "groups/*": (
            "share",
            "all_right and all_wrong: groups by their answers, before algorithm.filter_groups; "
            "same_reward: groups that teach nothing",
        ),
        "curriculum/*": ("", "how often prompts are sampled, with data.curriculum"),
        "training/filter_groups/*": ("groups", "what algorithm.filter_groups has replaced or left over"),
    },
    "Engine against actor": {
        "mismatch/*": ("nats", "kl: mean of log p_engine - log p_actor over sampled tokens; max and p99 of its size"),
        "training/rollout_probs_diff_mean": ("", "mean difference of the probabilities"),
        "training/rollout_probs_diff_max": ("", "largest difference of the probabilities"),
        "rollout_corr/log_ppl_abs_diff": ("nats", "of the log-perplexities, mean over responses"),
        "rollout_corr/rollout_is_*": ("", "importance weights, with algorithm.importance_sampling"),
        "rollout_corr/rollout_rs_*": ("share", "what algorithm.rejection leaves out"),
        "training/off_policy/trajectory_staleness*": ("steps", "age of the trajectories; worst: of their oldest token"),
        "training/off_policy/trajectory_spans/max": ("steps", "the most weight versions that sampled one trajectory"),
        "training/off_policy/evicted_samples": ("", "trajectories that were too old"),
    },
    "Trajectories": {
        "behavior/*": ("", "calls, turns, stop reasons and times of trajectories: rollout/metrics.py"),
        "response_length/mean": ("tokens", "mean of a response, with the interpreter's output"),
        "response_length/min": ("tokens", "the shortest"),
        "response_length/max": ("tokens", "the longest"),
        "prompt_length/mean": ("tokens", "mean of a prompt"),
        "length/finished/*": ("tokens", "percentiles of responses that ended by themselves"),
        "tool/latency_s/*": ("s", "percentiles of a call from request to answer"),
        "tool/queue_s/p99": ("s", "of these, waiting for a worker slot"),
        "rollout/*": ("", "trajectories dropped by outages, in the step and in all; prompts that replaced others"),
        "engine/*": (
            "",
            "requests that a server computes and queues; hits of its prefix cache; restarts since the row before",
        ),
    },
    "SFT": {
        "loss": ("nats a token", "mean over the global batch's trained tokens"),
        "grad_norm": ("", "before clipping"),
        "lr": ("", "learning rate of the step"),
        "val_loss": ("nats a token", "of validation.files"),
        "gpu_percent": ("%", "share of the last second in which the logging rank's device was busy"),
    },
    "Validation in RL": {
        "val/*": ("", "accuracy with its 95 % interval (low, high), reward parts, groups and behaviour"),
        "val-core/*": ("share", "accuracy of each data source, by verl"),
        "best/*": ("", "with best.metric: the best step, its value, and validations since a better one"),
    },
    "Speed": {
        "tokens": ("tokens", "all tokens of the step, over all ranks"),
        "tokens_per_s": ("tokens/s", "tokens / (time_step_s without checkpoints and validation), for the whole run"),
        "tokens_per_s_per_gpu": ("tokens/s", "the same / GPUs of [cluster]"),
        "flops": ("FLOP", "model FLOPs of the step, by ModelShape.train_flops"),
        "mfu": ("share", "flops / (peak FLOPs * GPUs that train * seconds of the update); absent without a known peak"),
        "memory_gib*": (
            "GiB",
            "highest so far on any rank, or on rank_N: the device's allocator, or resident memory on a CPU",
        ),
        "experts/*": ("", "load_max_over_mean of a layer's experts (1: all alike), and the share of unused experts"),
        "time_step_s": ("s", "wall time of the step; in RL without validate_after, metrics and between_steps"),
        "time_*_s": ("s", "its phases, which add up to it; tool_wait is the interpreter's part of generation"),
        "time_start/*": ("s", "in the first row of a start: each stage of run/start.py; time_start_s: all of them"),
    },
}  # fmt: skip


def is_listed(name: str) -> bool:
    """Whether a row may have this number."""
    return _pattern().fullmatch(name) is not None


@cache
def _pattern() -> re.Pattern[str]:
    names = [name for section in METRICS.values() for name in section]
    return re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in names))


def as_markdown() -> str:
    """The table of docs/metrics.md."""
    lines: list[str] = []
    for title, names in METRICS.items():
        lines += [f"### {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in names.items()]
        lines.append("")
    return "\n".join(lines).rstrip()
